"""``--launcher env`` on two hosts: equal weights, one address, and a network failure is reported on both hosts."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.hosts.launches import (
    AUTOPIPE,
    STEPS,
    environment,
    gone,
    one_line,
    ranks,
    steps_made,
    weights,
)
from support.hosts.two_hosts import Hosts, why_not
from support.waiting import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts")]
PORT = 29555
Processes = list["subprocess.Popen[str]"]


@pytest.fixture
def start(hosts: Hosts, folder: Path) -> Iterator[Callable[..., Processes]]:
    """Start the command once on each host, as a launcher would."""
    started: Processes = []

    def begin(*words: str) -> Processes:
        for rank in range(2):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            place |= {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": str(PORT)}
            started.append(
                subprocess.Popen(
                    hosts.inside(rank, *AUTOPIPE, "train", "--launcher", "env", *words),
                    cwd=folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**environment(), **place},
                )
            )
        return started

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_two_hosts_train_to_equal_weights_and_listen_on_one_address(
    start: Callable[..., Processes], hosts: Hosts, folder: Path
) -> None:
    both = start("--steps", STEPS, "--run-dir", "run")
    addresses: set[str] = set()

    def done() -> bool:
        for index in range(2):
            shown = subprocess.run(hosts.inside(index, "ss", "-Hltn"), capture_output=True, text=True, check=True)
            places = [line.split()[3].rpartition(":") for line in shown.stdout.splitlines()]
            addresses.update(address for address, _, port in places if port != "22")  # sshd's
        return both[0].poll() is not None

    wait_until(done, 200)
    for process in both:
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, (out, err)
    assert weights(folder / "run") == weights(folder / "local")
    assert hosts.address(0) in addresses
    assert addresses <= {hosts.address(0), hosts.address(1)}


def test_a_network_failure_is_reported_on_both_hosts_and_leaves_no_process(
    start: Callable[..., Processes], hosts: Hosts, folder: Path
) -> None:
    run = folder / "cut"
    both = start("--steps", "1000000", "--run-dir", run.name)
    wait_until(lambda: steps_made(run) > 3, 150)
    started = ranks(run)
    hosts.link(1, "down")
    try:
        errors = [one_line(process.communicate(timeout=60)[1]) for process in both]
    finally:
        hosts.link(1, "up")
    assert "rank 1" in errors[0], errors
    assert "or the host does not answer" in errors[0]
    assert "the process of rank 0 is gone" in errors[1], errors
    assert [process.returncode for process in both] == [3, 1]
    assert gone(started.values(), 5)
