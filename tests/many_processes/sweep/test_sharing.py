"""Jobs of a sweep that share a device: they take turns, and have the weights of training alone."""

from __future__ import annotations

import json
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.commands import Commands, assert_gone
from support.sweeps.cases import alone, assert_equal_weights, processes_in
from support.sweeps.shared import TWO, steps_of, write_shared
from support.waiting import wait_until

SWEEP = ("sweep", "sweep.toml", "--sweep-dir", "sweep", "--devices", "1")
SHARED = (*SWEEP, "--jobs-per-device", "2")


def assert_as_alone(commands: Commands, row: dict[str, Any]) -> None:
    """Assert that a job has the weights of ``autopipe train`` with its learning rate, without other jobs."""
    run = f"alone-{row['number']}"
    words = ("--steps", str(row["steps"]), "--work-dir", "work", "--lr", str(row["settings"]["lr"]))
    commands.document(*alone(run, *words))
    assert_equal_weights(Path(row["run_dir"]), commands.folder / run)


def assert_never_at_once(folder: Path) -> None:
    for step, following in pairwise(steps_of(folder)):
        assert step.end <= following.begin, (step, following)


def begun(commands: Commands, *more: str) -> Any:
    """Start a sweep, and wait until both jobs have a checkpoint."""
    process = commands.start(*SHARED, *more)
    latest = "jobs/*/run/checkpoints/latest"
    wait_until(lambda: process.poll() is not None or len(list((commands.folder / "sweep").glob(latest))) == 2, 60)
    assert process.poll() is None, process.communicate()
    return process


def test_two_jobs_take_turns_on_a_device_and_are_as_alone(commands: Commands) -> None:
    write_shared(commands.folder, steps=30)
    document = commands.document(*SHARED)
    assert [row["status"] for row in document["jobs"]] == ["done", "done"]
    assert document["jobs_per_device"] == 2
    assert [event["what"] for event in document["events"]] == ["started", "started", "done", "done"]
    steps = steps_of(commands.folder)
    assert {step.job for step in steps} == {1, 2}
    assert_never_at_once(commands.folder)
    # one after the other would be one change
    assert sum(step.job != following.job for step, following in pairwise(steps)) > 20
    for row in document["jobs"]:
        request = json.loads((Path(row["run_dir"]).parent / "plan-record.json").read_text())["request"]
        assert request["gpu_memory_bytes"] == 45 * 1024
        assert_as_alone(commands, row)
    assert list((commands.folder / "sweep").glob("token-*")) == []
    assert_gone(processes_in(commands.folder))


def test_a_rank_that_is_killed_with_the_token_does_not_stop_the_other_job(commands: Commands) -> None:
    write_shared(commands.folder, steps=30, jobs=TWO + "checkpoint-every = 5\n")
    (commands.folder / "kill").touch()
    document = commands.document(*SHARED)
    assert not (commands.folder / "kill").exists()
    assert [(row["status"], row["leases"]) for row in document["jobs"]] == [("done", 1)] * 2
    assert_never_at_once(commands.folder)
    for row in document["jobs"]:
        assert_as_alone(commands, row)
    assert_gone(processes_in(commands.folder))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_sweep_of_jobs_that_share_a_device_goes_on(commands: Commands, number: signal.Signals) -> None:
    write_shared(commands.folder, steps=100, jobs=TWO + "checkpoint-every = 5\n")
    process = begun(commands)
    everything = processes_in(commands.folder)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (75 if number == signal.SIGINT else -signal.SIGKILL), err
    if number == signal.SIGINT:
        assert "--devices 1 --jobs-per-device 2 --sweep-dir sweep --resume" in err
    assert_gone(everything)
    _, err = commands.run(*SWEEP, "--jobs-per-device", "3", "--resume", code=1)
    assert "2 jobs a device were chosen when the sweep began, and now 3" in err
    document = commands.document(*SWEEP, "--resume")  # the number of the folder
    assert [row["status"] for row in document["jobs"]] == ["done", "done"]
    assert document["jobs_per_device"] == 2
    assert_never_at_once(commands.folder)
    for row in document["jobs"]:
        assert_as_alone(commands, row)
    assert list((commands.folder / "sweep").glob("token-*")) == []
    assert_gone(processes_in(commands.folder))


def test_a_job_whose_model_fits_has_its_device_for_itself(commands: Commands) -> None:
    write_shared(commands.folder, steps=10, jobs=TWO + '[[job]]\nname = "fits"\ntarget = "model.py"\nlr = 0.1\n')
    document = commands.document(*SHARED)
    assert [row["status"] for row in document["jobs"]] == ["done"] * 3
    running: set[str] = set()
    for event in document["events"]:
        (running.add if event["what"] == "started" else running.discard)(event["job"])
        assert "fits" not in running or running == {"fits"}
    assert {step.job for step in steps_of(commands.folder)} == {1, 2}  # no token is left for the third


def test_auto_asks_the_simulation_and_a_dry_run_shows_it(commands: Commands) -> None:
    write_shared(commands.folder, steps=10, more='jobs-per-device = "auto"')
    (commands.folder / "meet").unlink()
    planned = commands.document(*SWEEP, "--dry-run")
    assert planned["jobs_per_device"] >= 1 and {lease["job"] for lease in planned["leases"]} == set(
        planned["step_seconds"]
    )
    document = commands.document(*SWEEP)
    assert [row["status"] for row in document["jobs"]] == ["done", "done"]
    stored = json.loads((commands.folder / "sweep" / "sweep.json").read_text())["jobs_per_device"]
    assert stored == document["jobs_per_device"] >= 1
    assert_as_alone(commands, document["jobs"][0])


def test_a_number_that_is_none_is_refused(commands: Commands) -> None:
    write_shared(commands.folder, steps=5)
    _, err = commands.run(*SWEEP, "--jobs-per-device", "0", code=2)
    assert "'0' is neither auto nor a number of jobs from 1 to 64" in err
    write_shared(commands.folder, steps=5, more='jobs-per-device = "many"')
    _, err = commands.run(*SWEEP, code=1)
    assert "sweep.toml: jobs-per-device" in err and "'many' is neither auto" in err
