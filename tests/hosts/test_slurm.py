"""A real SLURM cluster of two nodes: srun and sbatch train to equal weights; a failure ends the job with its cause."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts.launches import (
    AUTOPIPE,
    OPTIONS,
    SLOW,
    STEPS,
    gone,
    one_line,
    ranks,
    steps_made,
    weights,
)
from support.hosts.slurm_cluster import ALLOCATED, Slurm, left, slurm, why_not
from support.waiting import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not() or "slurm")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm(folder) as running:
        yield running
    assert left(folder) == []


def test_srun_in_an_allocation_trains_to_equal_weights(cluster: Slurm, folder: Path) -> None:
    command = (*ALLOCATED, *AUTOPIPE, "train", "--launcher", "slurm", "--steps", STEPS, "--run-dir", "srun", "--json")
    done = cluster.run(*command, cwd=folder, seconds=200)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["ranks"], document["steps"]) == (2, int(STEPS))
    assert weights(folder / "srun") == weights(folder / "local")


def test_a_batch_job_trains_to_equal_weights(cluster: Slurm, folder: Path) -> None:
    options = ("--slurm-option", "nodes=2", "--steps", STEPS, "--run-dir", "a $(touch pwned) run")
    done = cluster.run(*AUTOPIPE, "train", *options, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    submitted = json.loads(done.stdout)["submitted"]
    assert submitted["job"] in done.stderr
    state = cluster.wait(submitted["job"], ["COMPLETED", "FAILED"], 200)
    assert state == "COMPLETED 0:0", Path(submitted["output"]).read_text()
    assert f'"steps": {STEPS}' in Path(submitted["output"]).read_text()
    assert weights(folder / "a $(touch pwned) run") == weights(folder / "local")
    assert not (folder / "pwned").exists()


def test_a_preempted_job_is_requeued_and_resumes_to_equal_weights(cluster: Slurm, folder: Path) -> None:
    # different data needs a new profile and a new plan, for the same microbatches
    options = ("--slurm-option", "nodes=2", "--data", "slow.py:data", *OPTIONS, "--steps", STEPS, "--run-dir", "again")
    (folder / "slow.py").write_text(SLOW)
    done = cluster.run(*AUTOPIPE, "train", "model.py", *options, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    submitted = json.loads(done.stdout)["submitted"]
    job, output = submitted["job"], Path(submitted["output"])
    wait_until(lambda: steps_made(folder / "again") > 3, 150, lambda: output.read_text() if output.exists() else "")
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    wait_until(lambda: cluster.state(job).startswith("PENDING"), 60, lambda: (cluster.state(job), output.read_text()))
    assert 3 < steps_made(folder / "again") < int(STEPS)
    assert "stopped cleanly at step" in output.read_text()
    # by default SLURM waits two minutes; within a second of the requeue slurmd refuses the job as killed
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")
    state = cluster.wait(job, ["COMPLETED", "FAILED"], 200)
    assert state == "COMPLETED 0:0", f"{output.read_text()}\n{cluster.logs()}"
    assert weights(folder / "again") == weights(folder / "local")


def test_a_cancelled_job_saves_a_checkpoint_and_is_not_requeued(cluster: Slurm, folder: Path) -> None:
    options = ("--slurm-option", "nodes=2", "--steps", "1000000", "--run-dir", "cancelled")
    submitted = json.loads(cluster.run(*AUTOPIPE, "train", *options, "--json", cwd=folder).stdout)["submitted"]
    output = Path(submitted["output"])
    wait_until(lambda: steps_made(folder / "cancelled") > 3, 150, lambda: output.read_text() if output.exists() else "")
    cluster.run("scancel", submitted["job"])
    assert cluster.wait(submitted["job"], ["CANCELLED", "COMPLETED", "FAILED"], 60).startswith("CANCELLED")
    wait_until(lambda: "stopped cleanly at step" in output.read_text(), 20, output.read_text)
    assert (folder / "cancelled" / "checkpoints" / "latest").exists()


@pytest.mark.parametrize("what", ["rank", "task"])
def test_a_killed_rank_ends_the_job_and_is_reported(cluster: Slurm, folder: Path, what: str) -> None:
    run = folder / f"killed-{what}"
    command = [*ALLOCATED, *AUTOPIPE, "train", "--launcher", "slurm", "--steps", "1000000", "--run-dir", run.name]
    process = subprocess.Popen(
        command, cwd=folder, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: steps_made(run) > 3, 150)
        started = ranks(run)
        assert sorted(started) == [0, 1]
        (started[1] if what == "rank" else started[1].parent().parent()).kill()  # type: ignore[union-attr]
        _, err = process.communicate(timeout=40)
    finally:
        process.kill()
        process.communicate()
    text = one_line(err)
    # the exit code of srun is the highest of its tasks
    assert process.returncode == (3 if what == "rank" else 128 + 9), err
    assert "task 0: Exited with exit code 3" in text
    assert "rank 1" in text
    assert ("killed by SIGKILL" if what == "rank" else "its process on") in text
    assert "Traceback" not in err
    assert "a bug in autopipe" not in err
    assert gone(started.values(), 5)


def test_a_refusal_of_sbatch_is_shown_in_its_words(cluster: Slurm, folder: Path) -> None:
    done = cluster.run(*AUTOPIPE, "train", "--slurm-option", "partition=none-such", cwd=folder)
    assert done.returncode == 1
    assert "sbatch refused the job" in done.stderr
    assert "partition" in done.stderr.partition("\n")[0]


def test_a_dry_run_prints_the_script_and_submits_nothing(cluster: Slurm, folder: Path) -> None:
    before = queued(cluster)  # an earlier job may still be completing
    done = cluster.run(*AUTOPIPE, "train", "--slurm-option", "nodes=2", "--dry-run", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=2" in done.stdout
    assert "srun --kill-on-bad-exit=1" in done.stdout
    assert queued(cluster) <= before


def queued(cluster: Slurm) -> set[str]:
    """Return the numbers of the jobs that are waiting, running or completing."""
    return set(cluster.run("squeue", "--noheader", "--format=%i").stdout.split())
