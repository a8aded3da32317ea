"""Two torchrun agents of one process each: weights equal to a local run, and both report every failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.hosts.launches import (
    AUTOPIPE,
    OPTIONS,
    SLOW,
    STEPS,
    environment,
    free_port,
    gone,
    one_line,
    ranks,
    steps_made,
    weights,
)
from support.waiting import wait_until

pytestmark = pytest.mark.hosts
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
Agents = list["subprocess.Popen[str]"]


@pytest.fixture
def agents(folder: Path) -> Iterator[Callable[..., Agents]]:
    """Start torchrun twice, as if on two hosts."""
    started: Agents = []

    def begin(*words: str) -> Agents:
        port = str(free_port())
        for index in range(2):
            torchrun = [TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(index)]
            torchrun += ["--master-addr", "127.0.0.1", "--master-port", port, "--no-python"]
            command = [*torchrun, *AUTOPIPE, "train", "--launcher", "env", *words]
            started.append(
                subprocess.Popen(
                    command,
                    cwd=folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment(),
                    start_new_session=True,
                )
            )
        return started

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        process.communicate()


def test_two_agents_train_to_equal_weights_and_only_rank_0_prints(agents: Callable[..., Agents], folder: Path) -> None:
    first, second = agents("--steps", STEPS, "--run-dir", "run", "--json")
    out, err = first.communicate(timeout=200)
    assert first.returncode == 0, err
    other_out, other_err = second.communicate(timeout=20)
    assert second.returncode == 0, other_err
    assert json.loads(out)["steps"] == int(STEPS)
    assert other_out == ""
    assert "step" not in other_err
    assert weights(folder / "run") == weights(folder / "local")


@pytest.mark.parametrize("killed", [0, 1])
def test_both_hosts_name_the_rank_that_was_killed(agents: Callable[..., Agents], folder: Path, killed: int) -> None:
    run = folder / f"killed-{killed}"
    both = agents("--steps", "1000000", "--run-dir", run.name)
    wait_until(lambda: steps_made(run) > 3, 150)
    started = ranks(run)
    started[killed].kill()
    for process in both:
        _, err = process.communicate(timeout=40)
        text = one_line(err)
        assert process.returncode != 0
        assert f"rank {killed}" in text
        assert "killed by SIGKILL" in text
        assert "Connection closed by peer" not in text
        assert "a bug in autopipe" not in text
    assert gone(started.values(), 5)


def test_the_running_processes_start_the_ranks_again(agents: Callable[..., Agents], folder: Path) -> None:
    (folder / "slow.py").write_text(SLOW)
    run = folder / "again"
    words = ("model.py", *OPTIONS, "--data", "slow.py:data", "--checkpoint-every", "5", "--max-restarts", "1")
    both = agents(*words, "--steps", STEPS, "--run-dir", run.name, "--json")
    wait_until(lambda: steps_made(run) > 12, 200)
    ranks(run)[1].kill()
    out, err = both[0].communicate(timeout=200)
    assert both[0].returncode == 0, err
    assert [restart["rank"] for restart in json.loads(out)["restarts"]] == [1]
    both[1].communicate(timeout=20)
    assert both[1].returncode == 0
    assert weights(run) == weights(folder / "local")


def test_a_killed_process_of_rank_0_is_reported_by_the_other(agents: Callable[..., Agents], folder: Path) -> None:
    run = folder / "headless"
    both = agents("--steps", "1000000", "--run-dir", run.name)
    wait_until(lambda: steps_made(run) > 3, 150)
    started = ranks(run)
    started[0].parent().parent().kill()  # type: ignore[union-attr]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert "the process of rank 0 is gone" in one_line(errors[1])
    assert gone(started.values(), 5)


def test_a_hanging_rank_is_reported_by_both_hosts(agents: Callable[..., Agents], folder: Path) -> None:
    run = folder / "hung"
    both = agents("--steps", "1000000", "--run-dir", run.name, "--watchdog", "8")
    wait_until(lambda: steps_made(run) > 3, 150)
    started = ranks(run)
    started[1].suspend()
    for process in both:
        text = one_line(process.communicate(timeout=60)[1])
        assert "no rank has moved for" in text
        assert "at: rank 1" in text
        assert "stopped by a signal" in text
    assert gone(started.values(), 5)


def test_sigterm_on_one_host_stops_all_hosts_with_a_checkpoint(agents: Callable[..., Agents], folder: Path) -> None:
    run = folder / "preempted"
    both = agents("--steps", "1000000", "--run-dir", run.name)
    wait_until(lambda: steps_made(run) > 3, 150)
    both[1].terminate()  # torchrun forwards the signal to its own process only
    _, err = both[0].communicate(timeout=60)
    assert "stopped cleanly at step" in one_line(err)
    assert (run / "checkpoints" / "latest").exists()


def test_a_wrong_number_of_ranks_is_refused_by_every_process_with_both_numbers(
    agents: Callable[..., Agents],
) -> None:
    for process in agents("--gpus", "3", "--steps", "1"):
        _, err = process.communicate(timeout=100)
        assert process.returncode != 0
        assert "--gpus is 3, but torchrun has started 2 ranks" in one_line(err)
