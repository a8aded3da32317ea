"""Failures on the command line: messages, exit codes, tracebacks."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autopipe.commands import artifact_steps
from autopipe.commands.training import runs
from autopipe.errors import PlanError, WorkerError
from autopipe.report.results import CheckReport, TrainResult

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (
            ["train", "x.py", "--launcher", "slurm"],
            "--launcher slurm needs the number of ranks: --gpus is not given, and no plan is stored",
        ),
        (["train", "nowhere.py", "--gpus", "2"], "file not found: nowhere.py"),
        (["plan", "--gpus", "2"], "no model was named"),
        (["generate"], "there is no plan.json"),
        (["simulate"], "there is no plan.json"),
        (["eval"], "there is no run with a checkpoint"),
        (["export", "-o", "x.safetensors"], "there is no run with a checkpoint"),
        (["export", "-o", "x.bin"], "use the suffix .safetensors or .pt"),
    ],
)
def test_an_error_has_exit_code_1_and_a_remedy(run, args, shown):
    done = run(*args)
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: ") or "\nError: " in done.stderr
    assert shown in done.stderr
    assert "  try: " in done.stderr
    assert "Traceback" not in done.stderr
    document = json.loads(run(*args, "--json").stdout)
    assert set(document["error"]) >= {"type", "what", "at", "try"}


def fail(error):
    def raising(*args, **kwargs):
        raise error

    return raising


def test_a_failed_rank_has_exit_code_3_and_its_traceback_needs_debug(run, monkeypatch):
    error = WorkerError("ValueError: no", rank=1, stage=1, instruction="1F3", remote_traceback="File model.py, line 3")
    monkeypatch.setattr(runs, "train", fail(error))
    done = run("train", "x.py")
    assert done.exit_code == 3
    assert "at:  rank 1, stage 1, instruction 1F3" in done.stderr
    assert "File model.py, line 3" not in done.stderr
    assert "File model.py, line 3" in run("train", "x.py", "--debug").stderr
    assert json.loads(run("train", "x.py", "--json").stdout)["error"]["rank"] == 1


def test_ctrl_c_has_exit_code_130(run, monkeypatch):
    monkeypatch.setattr(runs, "train", fail(KeyboardInterrupt()))
    done = run("train", "x.py")
    assert done.exit_code == 130
    assert "stopped by Ctrl-C" in done.stderr


def test_ctrl_c_at_any_time_has_exit_code_130():
    code = (
        "import os, signal\n"
        "from autopipe.cli import main\n"
        "from autopipe.commands.planning import simulating\n"
        "def wait(*args, **more):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    signal.pause()\n"
        "simulating.simulate = wait\n"
        "main.autopipe(['simulate'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 128 + signal.SIGINT


def test_a_clean_stop_has_exit_code_75(run, monkeypatch):
    result = TrainResult((1.0,), 1, 1.0, 1.0, 2, "1f1b", 2, "runs/a", "runs/a/c", stopped=True)
    monkeypatch.setattr(runs, "train", lambda settings, events, rendezvous=None: result)
    done = run("train", "x.py")
    assert done.exit_code == 75
    assert "next: the same command with --resume" in done.stderr


def test_a_failed_check_has_exit_code_1(run, monkeypatch):
    monkeypatch.setattr(runs, "check", lambda settings, progress: CheckReport(False, False, 0.5, ()))
    done = run("check", "x.py")
    assert done.exit_code == 1
    assert "NOT equal to plain training" in done.stdout


def test_a_traceback_is_shown_only_with_debug(run, monkeypatch):
    monkeypatch.setattr(artifact_steps, "plan", fail(PlanError("no plan", where="here", remedy="more memory")))
    assert run("plan", "x.py").stderr.endswith("Error: no plan\n  at:  here\n  try: more memory\n")
    assert "Traceback" in run("plan", "x.py", "--debug").stderr
    assert "Traceback" in run("--debug", "plan", "x.py").stderr


def test_an_internal_error_shows_its_traceback_with_exit_code_1(run, monkeypatch):
    monkeypatch.setattr(artifact_steps, "plan", len)  # only code of autopipe is on the stack when it fails
    done = run("plan", "x.py", "--json")
    assert done.exit_code == 1
    assert "a bug in autopipe: TypeError: len() takes no keyword arguments" in done.stderr
    assert json.loads(done.stdout)["error"]["type"] == "Bug"


def test_an_exception_of_the_users_code_is_not_an_internal_error(run, monkeypatch):
    monkeypatch.setattr(artifact_steps, "plan", fail(ZeroDivisionError("oops")))  # this file plays the user's file
    done = run("plan", "x.py", "--json")
    assert done.exit_code == 1
    assert "Error: your code raised ZeroDivisionError: oops" in done.stderr
    assert "test_errors.py" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["error"]["type"] == "ModelFileError"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (PermissionError(13, "Permission denied", "/x/plan.json"), "cannot use /x/plan.json: Permission denied"),
        (OSError(28, "No space left on device"), "a disk is full: No space left on device"),
        (OSError(28, "No space left on device", "/x/plan.json"), "the disk of /x/plan.json is full"),
        (
            shutil.Error([("a.py", "/x/a.py", "[Errno 28] No space left on device: '/x/a.py'"), ("b", "c", "d")]),
            "Error: the disk of /x/a.py is full\n",
        ),
        (OSError("AF_UNIX path too long"), "operating system error: AF_UNIX path too long"),
        (MemoryError(), "out of memory"),
    ],
)
def test_an_error_of_the_operating_system_is_not_an_internal_error(run, monkeypatch, error, shown):
    monkeypatch.setattr(artifact_steps, "plan", fail(error))
    done = run("plan", "x.py")
    assert done.exit_code == 1
    assert shown in done.stderr
    assert "  try: " in done.stderr
    assert "Traceback" not in done.stderr


def test_an_exception_of_a_library_is_not_blamed_on_the_user(run, monkeypatch, tmp_path):
    # called by autopipe, from a file of an installed package
    (tmp_path / "site-packages").mkdir()
    library = tmp_path / "site-packages" / "library.py"
    library.write_text("def refuse(*args, **kwargs):\n    raise TypeError('cannot be updated')\n")
    monkeypatch.syspath_prepend(str(library.parent))
    import library as installed

    monkeypatch.setattr(artifact_steps, "request_of", installed.refuse)
    done = run("plan", "x.py")
    assert done.exit_code == 1
    assert "a bug in autopipe: TypeError: cannot be updated" in done.stderr
    assert "your code" not in done.stderr
