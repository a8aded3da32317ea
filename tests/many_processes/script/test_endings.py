"""However a script ends, in stages it ends in the same way, and leaves no process and no folder."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from support.script_runs import SCRIPTS, by_python, in_stages

CODES = {"exception": 1, "exit": 7, "text": 1, "hard": 9, "interrupt": -2, "killed": -9, "finish": 0}


def nothing_left() -> bool:
    ranks = [p for p in psutil.process_iter(["cmdline"]) if "autopipe.script.rank" in " ".join(p.info["cmdline"] or ())]
    own = [p for p in ranks if p.environ().get("TMPDIR") == os.environ["TMPDIR"]]
    return not own and not list(Path(tempfile.gettempdir()).glob("autopipe-run-*"))


def wait_until_nothing_is_left() -> None:
    for _ in range(200):
        try:
            if nothing_left():
                return
        except psutil.Error:
            pass  # a process ended in between
        time.sleep(0.1)
    raise AssertionError("a process or a folder is left")


@pytest.mark.parametrize("how", CODES)
def test_a_script_ends_as_in_python(how: str, tmp_path: Path) -> None:
    plain = by_python(SCRIPTS / "endings.py", how, folder=tmp_path, new=True)
    staged = in_stages(SCRIPTS / "endings.py", how, folder=tmp_path)
    assert (plain.code, staged.code) == (CODES[how], CODES[how]), staged.errors
    assert staged.output == plain.output
    if how in ("exception", "text", "interrupt"):
        assert plain.errors
        assert plain.errors in staged.errors
    wait_until_nothing_is_left()


@pytest.mark.parametrize("when", ["rank", "starting"])
def test_a_rank_that_is_killed_ends_the_run_by_name(when: str, tmp_path: Path) -> None:
    staged = in_stages(SCRIPTS / "endings.py", when, folder=tmp_path)
    assert staged.code == 3
    assert "the process of a stage was killed by signal 9; the run cannot continue" in staged.errors
    assert "cannot run in stages" not in staged.errors
    assert "rank" in staged.errors
    wait_until_nothing_is_left()
