"""Runs with closed streams, full disks, undecodable or very long paths, and missing folders."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from support.commands import AUTOPIPE, training, write_model
from support.warm.programs import run_warm


def call_warm(folder: Path, *words: str, env: dict[str, str] | None = None) -> CompletedProcess[str]:
    """Call a command without special streams or interpreter settings."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return run_warm(AUTOPIPE, *words, cwd=folder, env=environment, timeout=240)


def call(folder: Path, *words: str, env: dict[str, str] | None = None, **streams: Any) -> CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    command = [AUTOPIPE, *words]
    return subprocess.run(
        command, cwd=folder, text=True, env=environment, timeout=240, check=False, errors="replace", **streams
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose model is profiled and planned, so that each run takes seconds."""
    directory = tmp_path_factory.mktemp("odd")
    write_model(directory, steps=20)
    assert call_warm(directory, *training(steps=1)).returncode == 0
    return directory


def closing(descriptor: int) -> dict[str, Any]:
    return {"preexec_fn": lambda: os.close(descriptor)}


@pytest.mark.parametrize("descriptor", [1, 2])
def test_a_run_with_closed_output_succeeds(folder: Path, descriptor: int) -> None:
    run = f"closed{descriptor}"
    done = call(folder, *training(steps=2, run=run), "--no-check", **closing(descriptor))
    assert done.returncode == 0
    assert (folder / run / "checkpoints" / "step-00000002").is_dir()


def test_a_run_in_a_path_that_the_locale_cannot_decode_succeeds(folder: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = call(folder, *training(steps=2, run="rün☃"), "--no-check", capture_output=True, env=plain)
    assert done.returncode == 0, done.stderr
    assert (folder / "rün☃" / "checkpoints" / "step-00000002").is_dir()
    # it resumes under another locale
    done = call_warm(folder, *training(steps=3, run="rün☃"), "--no-check", "--resume")
    assert done.returncode == 0, done.stderr


def test_sockets_are_not_placed_in_a_temporary_folder_with_a_long_path(folder: Path, tmp_path: Path) -> None:
    long = tmp_path / ("l" * 140)
    long.mkdir()
    done = call_warm(folder, *training(steps=2, run="long"), "--no-check", env={"TMPDIR": str(long)})
    assert done.returncode == 0, done.stderr
    assert not list(long.glob("pymp-*"))


def test_a_dangling_link_is_named(folder: Path) -> None:
    (folder / "link").symlink_to("/nowhere/at/all")
    done = call_warm(folder, *training(steps=2, run="link"), "--no-check")
    assert done.returncode == 1
    assert "link is a link to /nowhere/at/all, which does not exist" in done.stderr


def test_a_full_disk_for_standard_output_is_reported(folder: Path) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = call(folder, "simulate", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert "standard output cannot be written: No space left on device" in done.stderr
    assert "--work-dir" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_for_standard_error_does_not_end_a_run(folder: Path, unbuffered: str) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        words = (*training(steps=2, run=f"full{unbuffered}"), "--no-check")
        done = call(folder, *words, env={"PYTHONUNBUFFERED": unbuffered}, stdout=subprocess.PIPE, stderr=full)
    assert done.returncode == 0
    assert "2 steps in" in done.stdout


COLLECTS = """
import gc
quiet_data = data
def data(batch_size=8):
    for item in quiet_data(batch_size):
        print(f"garbage collection: {gc.isenabled()}", flush=True)
        yield item
"""


def test_ranks_collect_garbage(tmp_path: Path) -> None:
    write_model(tmp_path, steps=20)
    with (tmp_path / "model.py").open("a") as file:
        file.write(COLLECTS)
    done = call(tmp_path, *training(steps=2), "--no-check", capture_output=True)
    assert done.returncode == 0, done.stderr
    logs = [(tmp_path / "run" / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert "garbage collection: True" in logs[0]
    assert not [log for log in logs if "garbage collection: False" in log]
