"""``autopipe sweep``: the weights of each job are those of training it alone, whatever happens to the sweep."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from support.commands import Commands, assert_gone
from support.sweeps.cases import alone, assert_equal_weights, processes_in, ranks_in, write_sweep
from support.waiting import wait_until

FOUR = '[[job]]\ntarget = "model.py"\ngrid = { lr = [0.01, 0.001], seed = [1, 2] }\n'
SHARED = (
    '[[job]]\ntarget = "model.py"\nschedule = "spilled"\ngpu-memory = "90KiB"\n'
    "list = [{ lr = 0.01 }, { lr = 0.001 }, { lr = 0.02 }]\n"
)
SWEEP = ("sweep", "sweep.toml", "--sweep-dir", "sweep")
SLOW, QUICK = "0.1", "0"  # seconds a minibatch: a lease ends in the middle of a job, or the time does not matter


def rows(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in document["jobs"]}


def happened(document: dict[str, Any], what: str) -> list[str]:
    return [event["job"] for event in document["events"] if event["what"] == what]


def assert_as_alone(commands: Commands, row: dict[str, Any], *options: str) -> None:
    """Assert that a job has the weights of ``autopipe train`` with its options."""
    words = [word for name, value in row["settings"].items() for word in (f"--{name}", str(value))]
    run = f"alone-{row['number']}"
    commands.document(*alone(run, "--steps", str(row["steps"]), "--work-dir", "work", *words, *options))
    assert_equal_weights(Path(row["run_dir"]), commands.folder / run)


def started(commands: Commands, *more: str) -> Any:
    """Start a sweep, and wait until two jobs train and one has a checkpoint."""
    process = commands.start(*SWEEP, *more)
    wait_until(
        lambda: (
            process.poll() is not None
            or (
                len(list((commands.folder / "sweep").glob("jobs/*/run/checkpoints/latest"))) > 0
                and len(list(ranks_in(commands.folder))) == 2
            )
        ),
        60,
    )
    assert process.poll() is None, process.communicate()
    return process


def kill_one(commands: Commands, *, job: bool) -> None:
    """Kill a rank, or its job. A lease may end at any moment, and its processes with it: try until one was killed."""

    def killed() -> bool:
        alive = processes_in(commands.folder)
        with contextlib.suppress(psutil.Error):
            for rank in ranks_in(commands.folder):
                server = rank.parent()
                victim = rank if not job else server and server.parent()
                if victim in alive:
                    victim.kill()  # type: ignore[union-attr]
                    return True
        return False

    wait_until(killed, 60)


def test_jobs_in_leases_have_the_weights_of_training_alone(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sweep(commands.folder, FOUR, steps=60)
    monkeypatch.setenv("SWEEP_PAUSE", SLOW)
    document = commands.document(*SWEEP)
    monkeypatch.setenv("SWEEP_PAUSE", QUICK)
    by_name = rows(document)
    assert len(by_name) == 4
    assert {row["status"] for row in by_name.values()} == {"done"}
    assert len(happened(document, "stopped")) >= 1
    assert {event["devices"] for event in document["events"]} == {"0", "1"}
    assert [row["metric"] for row in document["jobs"]] == sorted(row["metric"] for row in document["jobs"])
    for row in by_name.values():
        assert_as_alone(commands, row)
    # the structure was prepared once, and its comparison with plain training stands for all
    assert len(list((commands.folder / "sweep" / "shared").iterdir())) == 1
    frame = pd.read_csv(document["results"])
    assert frame["step"].tolist() == [60] * 4 and frame["lr"].tolist() == [0.01, 0.01, 0.001, 0.001]
    assert_gone(processes_in(commands.folder))
    _, err = commands.run(*SWEEP, code=1)
    assert "already contains a sweep" in err
    again = commands.document(*SWEEP, "--resume")
    assert again["events"] == [] and rows(again) == by_name


def test_a_failed_job_is_a_row_and_stops_no_other(commands: Commands) -> None:
    write_sweep(commands.folder, FOUR, steps=20)
    (commands.folder / "bad.py").write_text(
        (commands.folder / "model.py").read_text().replace("step == -1", "step == 9")
    )
    with (commands.folder / "sweep.toml").open("a") as file:
        file.write('[[job]]\ntarget = "bad.py"\n[[job]]\nname = "no model"\ntarget = "empty.py"\n')
    (commands.folder / "empty.py").write_text("import torch\n")
    document = commands.document(*SWEEP)
    by_name = rows(document)
    assert [row["status"] for row in document["jobs"]] == ["done"] * 4 + ["failed"] * 2
    assert "index out of range" in by_name["bad"]["error"] and by_name["bad"]["step"] > 0
    assert "empty.py" in by_name["no model"]["error"] and by_name["no model"]["leases"] == 0
    # when the file is right again, only the failed jobs are trained
    (commands.folder / "bad.py").write_text((commands.folder / "model.py").read_text())
    (commands.folder / "empty.py").write_text((commands.folder / "model.py").read_text())
    again = commands.document(*SWEEP, "--resume")
    assert {row["status"] for row in again["jobs"]} == {"done"}
    assert set(happened(again, "started")) == {"bad", "no model"}


@pytest.mark.parametrize("victim", ["rank", pytest.param("job", marks=pytest.mark.slow)])
def test_a_killed_process_costs_no_job(commands: Commands, victim: str) -> None:
    write_sweep(commands.folder, FOUR, steps=60)
    process = started(commands, "--json")
    everything = processes_in(commands.folder)
    kill_one(commands, job=victim == "job")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    document = json.loads(out)
    assert {row["status"] for row in document["jobs"]} == {"done"}
    if victim == "job":
        assert len(happened(document, "retried")) == 1
    for row in document["jobs"][:2]:
        assert_as_alone(commands, row)
    assert_gone(everything)


def test_a_killed_sweep_goes_on_from_its_checkpoints(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sweep(commands.folder, FOUR, steps=60)
    monkeypatch.setenv("SWEEP_PAUSE", SLOW)
    process = started(commands)
    everything = processes_in(commands.folder)
    process.kill()
    process.communicate()
    assert_gone(everything)
    monkeypatch.setenv("SWEEP_PAUSE", QUICK)
    document = commands.document(*SWEEP, "--resume")
    assert {row["status"] for row in document["jobs"]} == {"done"}
    for row in document["jobs"]:
        assert_as_alone(commands, row)
    steps = {event["job"]: event["step"] for event in reversed(document["events"]) if event["what"] == "started"}
    assert max(steps.values()) > 0
    assert_gone(processes_in(commands.folder))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_stopped_sweep_has_checkpoints_and_says_how_to_go_on(
    commands: Commands, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sweep(commands.folder, FOUR, steps=60)
    monkeypatch.setenv("SWEEP_PAUSE", SLOW)
    process = started(commands)
    everything = processes_in(commands.folder)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "next: autopipe sweep sweep.toml --sweep-dir sweep --resume" in err
    assert_gone(everything)
    monkeypatch.setenv("SWEEP_PAUSE", QUICK)
    document = commands.document(*SWEEP, "--resume")
    assert {row["status"] for row in document["jobs"]} == {"done"}
    assert_as_alone(commands, document["jobs"][0])


def test_jobs_of_two_devices_and_jobs_that_do_not_fit(commands: Commands) -> None:
    jobs = (
        '[[job]]\nname = "wide"\ntarget = "model.py"\ngpus = 2\nreplicas = "never"\nsteps = 40\n'
        '[[job]]\nname = "narrow"\ntarget = "model.py"\n'
        '[[job]]\nname = "spilled"\ntarget = "model.py"\ngpu-memory = "45KiB"\n'
    )
    write_sweep(commands.folder, jobs, steps=30)
    document = commands.document(*SWEEP)
    by_name = rows(document)
    assert {row["status"] for row in by_name.values()} == {"done"}, [row["error"] for row in by_name.values()]
    assert by_name["wide"]["devices"] == "0,1"
    assert_as_alone(commands, by_name["narrow"])
    commands.document(*alone("wide", "--steps", "40", "--work-dir", "wide-work", "--gpus", "2"))
    assert_equal_weights(Path(by_name["wide"]["run_dir"]), commands.folder / "wide")
    plan = json.loads((commands.folder / "sweep/jobs/0003-spilled/plan.json").read_text())
    assert plan["schedule"] == "spilled" and len(plan["stages"]) > 1
    assert any("spilled" in note or "device" in note for note in document["notes"])
    # gpipe's numbers are those of one process, too
    assert_equal_weights(Path(by_name["spilled"]["run_dir"]), Path(by_name["narrow"]["run_dir"]))


def test_jobs_that_share_a_device_have_the_weights_of_training_alone(commands: Commands) -> None:
    write_sweep(commands.folder, SHARED, steps=60, lease=60)
    sharing = (*SWEEP, "--devices", "1", "--jobs-per-device", "2")
    document = commands.document(*sharing)
    by_name = rows(document)
    assert {row["status"] for row in by_name.values()} == {"done"}, [row["error"] for row in by_name.values()]
    # two at a time: the third began when one of the first two was done
    assert [event["what"] for event in document["events"]][:3] == ["started", "started", "done"]
    plans = [json.loads(path.read_text()) for path in sorted((commands.folder / "sweep/jobs").glob("*/plan.json"))]
    assert {plan["schedule"] for plan in plans} == {"spilled"} and {len(plan["stages"]) > 1 for plan in plans} == {True}
    for row in by_name.values():
        assert_as_alone(commands, row, "--schedule", "spilled", "--gpu-memory", "45KiB")
    assert_gone(processes_in(commands.folder))
    assert not list((commands.folder / "sweep").glob("token-*"))
    _, err = commands.run(*SWEEP, "--devices", "1", "--jobs-per-device", "3", "--resume", code=1)
    assert "2 jobs a device were chosen when the sweep began, and now 3" in err
    assert commands.document(*SWEEP, "--devices", "1", "--resume")["events"] == []


@pytest.mark.slow
def test_a_killed_job_does_not_hurt_the_one_that_shares_its_device(commands: Commands) -> None:
    write_sweep(commands.folder, SHARED + "checkpoint-every = 5\n", steps=60, lease=60)
    process = started(commands, "--json", "--devices", "1", "--jobs-per-device", "2")
    kill_one(commands, job=True)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    document = json.loads(out)
    assert {row["status"] for row in document["jobs"]} == {"done"}
    assert len(happened(document, "retried")) == 1
    for row in document["jobs"]:
        assert_as_alone(commands, row, "--schedule", "spilled", "--gpu-memory", "45KiB")


def test_halving_drops_jobs_and_the_others_are_as_alone(commands: Commands) -> None:
    write_sweep(commands.folder, FOUR + "[stop]\nat = [10, 20]\nkeep = 0.5\n", steps=30, lease=60)
    document = commands.document(*SWEEP)
    assert (document["jobs"][0]["status"], document["jobs"][-1]["status"]) == ("done", "dropped")
    steps = sorted((row["step"], row["status"]) for row in document["jobs"])
    assert steps == [(10, "dropped"), (10, "dropped"), (20, "dropped"), (30, "done")]
    assert_as_alone(commands, document["jobs"][0])


def test_the_metric_is_the_evaluation_at_the_end(commands: Commands) -> None:
    write_sweep(commands.folder, FOUR, steps=5, lease=60, more='metric = "evaluation"')
    text = (commands.folder / "model.py").read_text()
    quick = (
        "def evaluate_data(batch_size=8):\n    yield from (item for item, _ in zip(quick_data(batch_size), range(3)))\n"
    )
    (commands.folder / "model.py").write_text(text + quick)
    document = commands.document(*SWEEP)
    assert all(row["metric"] is not None for row in document["jobs"])
    assert document["jobs"][0]["metric"] != document["jobs"][0]["loss"]
    assert [row["metric"] for row in document["jobs"]] == sorted(row["metric"] for row in document["jobs"])


def test_an_evaluation_that_was_lost_is_made_after_the_resume(commands: Commands) -> None:
    write_sweep(commands.folder, FOUR, steps=5, lease=60, more='metric = "evaluation"')
    text = (commands.folder / "model.py").read_text()
    quick = "def evaluate_data(batch_size=8):\n    yield from (x for x, _ in zip(quick_data(batch_size), range(3)))\n"
    (commands.folder / "model.py").write_text(text + quick)
    document = commands.document(*SWEEP)
    # as if the job was killed while it evaluated: its last checkpoint is there, the evaluation is not
    metrics = Path(document["jobs"][0]["run_dir"]) / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if "evaluation_loss" not in line))
    path = commands.folder / "sweep" / "sweep.json"
    stored = json.loads(path.read_text())
    del stored["digest"]
    entry = next(job for job in stored["jobs"] if job["name"] == document["jobs"][0]["name"])
    entry.update(status="running", metric=None)
    path.write_text(json.dumps(stored))
    again = commands.document(*SWEEP, "--resume")
    assert again["jobs"][0]["metric"] == document["jobs"][0]["metric"]
    assert happened(again, "started") == [document["jobs"][0]["name"]]


def test_a_damaged_checkpoint_costs_a_lease_and_no_job(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sweep(commands.folder, FOUR, steps=60)
    monkeypatch.setenv("SWEEP_PAUSE", SLOW)
    process = started(commands)
    wait_until(lambda: any(len(list(run.glob("step-*"))) > 1 for run in checkpoints_in(commands.folder)), 60)
    process.kill()
    process.communicate()
    damaged = next(run for run in checkpoints_in(commands.folder) if len(list(run.glob("step-*"))) > 1)
    newest = max(damaged.glob("step-*"))
    for file in newest.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-8] + b"damaged!")
    monkeypatch.setenv("SWEEP_PAUSE", QUICK)
    document = commands.document(*SWEEP, "--resume")
    assert {row["status"] for row in document["jobs"]} == {"done"}, [row["error"] for row in document["jobs"]]
    for row in document["jobs"]:
        assert_as_alone(commands, row)


def checkpoints_in(folder: Path) -> list[Path]:
    return list((folder / "sweep").glob("jobs/*/run/checkpoints"))


def test_a_dry_run_predicts_and_trains_nothing(commands: Commands) -> None:
    write_sweep(commands.folder, FOUR, steps=1000, lease=60)
    document = commands.document(*SWEEP, "--dry-run")
    assert {lease["job"] for lease in document["leases"]} == set(document["step_seconds"])
    assert document["seconds"] >= document["bound"] > 0
    assert not (commands.folder / "sweep" / "jobs").exists()
    assert_gone(processes_in(commands.folder))


def test_models_that_are_measured_in_a_process_of_their_own(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test what a sweep on GPUs does: the process of a job starts another one, which measures or compares."""
    monkeypatch.setenv("AUTOPIPE_APART", "1")
    write_sweep(commands.folder, '[[job]]\ntarget = "model.py"\ngrid = { lr = [0.01, 0.001] }\n', steps=10)
    document = commands.document(*SWEEP)
    assert {row["status"] for row in document["jobs"]} == {"done"}
    assert any("3 steps compared with plain training: equal, bit for bit" in note for note in document["notes"])
    assert_as_alone(commands, document["jobs"][0])


def test_an_error_in_the_file_comes_before_anything_runs(commands: Commands) -> None:
    write_sweep(commands.folder, FOUR + "stepz = 3\n", steps=5)
    _, err = commands.run(*SWEEP, code=1)
    assert "unknown option 'stepz'" in err and "sweep.toml: job[0].stepz" in err
    assert not (commands.folder / "sweep").exists()
