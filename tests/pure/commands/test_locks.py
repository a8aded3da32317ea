"""Locks: one command at a time in a directory."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopipe.commands.locks import only_one
from autopipe.errors import RunError


def test_a_second_command_is_refused_with_the_first_process(tmp_path: Path) -> None:
    text = rf"run is in use: process {os.getpid()} on \S+ trains in it"
    run = tmp_path / "run"
    with only_one(run, "trains"), pytest.raises(RunError, match=text) as caught, only_one(run, "trains"):
        pass
    assert "--run-dir" in caught.value.remedy
    with only_one(tmp_path / "run", "trains"):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = (
        "import sys, os, pathlib\n"
        "from autopipe.commands.locks import only_one\n"
        "with only_one(pathlib.Path(sys.argv[1]), 'trains'):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"process {holder.pid} "), only_one(tmp_path, "trains"):
            pass
        holder.kill()
    with only_one(tmp_path, "trains"):
        pass


def test_an_empty_lock_file_still_locks(tmp_path: Path) -> None:
    with only_one(tmp_path, "trains"):
        (tmp_path / "lock").write_text("[]")
        with pytest.raises(RunError, match="another process holds its lock"), only_one(tmp_path, "trains"):
            pass


def test_a_directory_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written: Not a directory"), only_one(tmp_path / "file" / "x", "y"):
        pass


def test_a_file_system_without_locks_refuses_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with only_one(tmp_path, "trains"):
        pass
