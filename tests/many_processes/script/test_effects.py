"""A forward that does more than compute: the same numbers as in python, or a refusal by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.script_runs import SCRIPTS, by_python, in_stages

SCRIPT = SCRIPTS / "effects.py"
REFUSED = {
    "count": "the forward sets count",
    "loss": "the forward sets extra",
    "append": "the forward sets kept",
    "named": "the forward sets named",
    "inner": "the forward sets settings",
    "global": "the forward sets total",
    "print": "the forward writes 'forward",
    "write": "the forward writes '4' to standard output",
    "first": "computes in another way after it has set",
}


@pytest.mark.parametrize("how", ["mask", "buffer"])
def test_masks_that_are_kept_and_buffers_are_those_of_python(how: str, tmp_path: Path) -> None:
    plain = by_python(SCRIPT, how, folder=tmp_path)
    staged = in_stages(SCRIPT, how, folder=tmp_path)
    assert plain.code == staged.code == 0, staged.errors
    assert len(plain.output.splitlines()) == 18
    assert staged.output == plain.output


@pytest.mark.parametrize("how", REFUSED)
def test_what_would_happen_only_once_is_refused_by_name(how: str, tmp_path: Path) -> None:
    staged = in_stages(SCRIPT, how, folder=tmp_path)
    assert staged.code != 0
    assert REFUSED[how] in staged.errors
    assert f"{SCRIPT}:" in staged.errors
    assert staged.output == ""
