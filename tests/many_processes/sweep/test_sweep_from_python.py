"""``autopipe.sweep(...)`` from a script, whose other code does not run again in the jobs."""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from support.commands import Commands, assert_gone
from support.sweeps.cases import alone, assert_equal_weights, processes_in, write_sweep
from support.sweeps.shared import steps_of, write_shared
from support.warm.programs import run_warm

import autopipe
from autopipe.errors import RunError
from autopipe.sweep import sharing
from autopipe.sweep.api import timetable

JOBS = '[[job]]\ntarget = "model.py"\ngrid = { lr = [0.01, 0.001] }\n'
SCRIPT = """
import json, pathlib, sys
with open("imports", "a") as file:
    file.write("x")
import torch
torch.set_num_threads(1)
before = float(torch.ones(4).sum())
import autopipe
kinds = set()
result = autopipe.sweep("sweep.toml", sweep_dir="sweep", on_event=lambda kind, fields: kinds.add(kind))
best = result.jobs[0]
print(json.dumps([[row.status for row in result.jobs], best.run_dir, best.settings, sorted(kinds), result.stopped]))
"""


class Stop:
    """A stop that is requested once jobs have trained so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.seen = steps, 0

    def __call__(self, kind: str, fields: object) -> None:
        if kind == "table":
            assert isinstance(fields, dict)
            self.seen = max(row.step for row in fields["rows"])

    def is_set(self) -> bool:
        return self.seen >= self.steps


def test_a_script_sweeps_and_is_not_imported_by_its_jobs(commands: Commands) -> None:
    write_sweep(commands.folder, JOBS, steps=10)
    (commands.folder / "script.py").write_text(SCRIPT)
    done = run_warm(str(commands.folder / "script.py"), cwd=commands.folder, timeout=120)
    assert done.returncode == 0, done.stderr
    states, run_dir, settings, kinds, stopped = json.loads(done.stdout.splitlines()[-1])
    assert states == ["done", "done"] and not stopped
    assert set(kinds) >= {"preparing", "job", "table"}
    assert (commands.folder / "imports").read_text() == "x"
    commands.document(*alone("alone", "--steps", "10", "--lr", str(settings["lr"])))
    assert_equal_weights(Path(run_dir), commands.folder / "alone")


def test_a_stop_of_the_caller_leaves_checkpoints(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sweep(commands.folder, JOBS, steps=60)
    monkeypatch.chdir(commands.folder)
    main = sys.modules["__main__"]
    stop = Stop(10)
    stopped = autopipe.sweep("sweep.toml", sweep_dir="sweep", on_event=stop, stop=stop)
    assert sys.modules["__main__"] is main
    assert stopped.stopped and 0 < max(row.step for row in stopped.jobs) < 60  # a job may not have begun
    with pytest.raises(RunError, match="already contains a sweep"):
        autopipe.sweep("sweep.toml", sweep_dir="sweep")
    result = autopipe.sweep("sweep.toml", sweep_dir="sweep", resume=True)
    assert [row.status for row in result.jobs] == ["done", "done"]
    assert isinstance(result, autopipe.SweepResult)
    lowest = result.jobs[0]
    commands.document(*alone("alone", "--steps", "60", "--lr", str(lowest.settings["lr"])))
    assert_equal_weights(Path(lowest.run_dir), commands.folder / "alone")
    # the server that jobs are forked from is a child of this process, and serves the next command
    assert_gone([process for process in processes_in(commands.folder) if process.ppid() != os.getpid()])


def test_wrong_devices_are_an_error_before_anything_runs(tmp_path: Path) -> None:
    write_sweep(tmp_path, JOBS, steps=60)
    with pytest.raises(ValueError, match="neither auto, a number of devices"):
        autopipe.sweep(tmp_path / "sweep.toml", devices=0)


@pytest.mark.slow
def test_jobs_share_a_device_once_the_simulation_has_chosen_it(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shared(commands.folder, steps=20)
    monkeypatch.chdir(commands.folder)
    # on a CPU, how long copies take cannot be chosen; what the simulation returns is tested with its jobs
    monkeypatch.setattr(sharing, "most_places", lambda jobs, *_, **__: sum(job.shares for job in jobs))
    planned = timetable("sweep.toml", sweep_dir="sweep", devices=1, jobs_per_device="auto")
    assert planned.jobs_per_device == 2
    assert max(lease.start for lease in planned.leases) == 0  # both begin at once
    result = autopipe.sweep("sweep.toml", sweep_dir="sweep", devices=1, jobs_per_device="auto")
    assert [row.status for row in result.jobs] == ["done", "done"] and result.jobs_per_device == 2
    assert len(result.notes) == len(set(result.notes))
    assert any(note.startswith("up to 2 jobs share a device") for note in result.notes)
    assert [event.what for event in result.events] == ["started", "started", "done", "done"]
    steps = steps_of(commands.folder)
    assert sum(step.job != following.job for step, following in pairwise(steps)) > 10
    for row in result.jobs:
        run = f"alone-{row.number}"
        commands.document(*alone(run, "--steps", "20", "--lr", str(row.settings["lr"]), "--work-dir", "work"))
        assert_equal_weights(Path(row.run_dir), commands.folder / run)
    assert_gone([process for process in processes_in(commands.folder) if process.ppid() != os.getpid()])


@pytest.mark.parametrize("number", [0, "many"])
def test_a_wrong_number_of_jobs_is_an_error_before_anything_runs(tmp_path: Path, number: int | str) -> None:
    write_sweep(tmp_path, JOBS, steps=60)
    with pytest.raises(ValueError, match="neither auto nor a number of jobs"):
        autopipe.sweep(tmp_path / "sweep.toml", jobs_per_device=number)
