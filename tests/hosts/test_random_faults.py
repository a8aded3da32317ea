"""Single faults, at random, on two hosts: each is named, ends all of it, and the run goes on to equal weights."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import faults
import psutil
import pytest
from faults import AUTOPIPE, COUNT, STEPS, TO_RANKS, Fault, moment, steps_done
from two_hosts import Hosts, two_hosts, why_not

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts"),
]
TO_HOSTS = ("agent", "fork server", "ssh client", "link", "coordinator")


def at_random(number: int) -> Fault:
    return Fault.at_random(number, TO_HOSTS, ranks=4)


def strike(fault: Fault, hosts: Hosts) -> str:
    """Do it, and return what is to be said: the rank that is to blame, or the host."""
    kind, whom = fault.kind, fault.whom
    if kind in TO_RANKS:
        hosts.ranks(whom // 2)[whom].send_signal(TO_RANKS[kind])
        return f"at: rank {whom} on h{whom // 2}"
    if kind == "coordinator":
        next(p for p in hosts.processes(0) if "--run-dir" in p.cmdline() and p.name() != "ssh").kill()
    elif kind == "link":
        hosts.link(1, "down")
        return "on h1"
    elif kind == "agent":
        hosts.agent(whom).kill()
    elif kind == "fork server":
        next(p for p in hosts.agent(whom).children() if "forkserver" in " ".join(p.cmdline())).kill()
    else:
        next(p for p in hosts.processes(0) if p.name() == "ssh" and f"h{whom}" in p.cmdline()).kill()
    return f"on h{whom}"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts") / "ssh") as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.prepared(tmp_path_factory.mktemp("work"), ranks=4)


def assert_nothing_runs(hosts: Hosts, seconds: float) -> None:
    end = time.monotonic() + seconds
    left: list[psutil.Process] = [*hosts.processes(0), *hosts.processes(1)]
    while left:
        assert time.monotonic() < end, left
        moment()
        left = [*hosts.processes(0), *hosts.processes(1)]


@pytest.mark.parametrize("number", range(COUNT), ids=lambda number: str(at_random(number)))
def test_a_fault_is_named_and_the_run_goes_on_to_equal_weights(hosts: Hosts, folder: Path, number: int) -> None:
    fault, run_dir = at_random(number), f"run-{number}"
    slots = ",".join(f"{name}:2" for name in hosts.names)
    words = [AUTOPIPE, *faults.training(run_dir), "--hosts", slots, "--ssh-config", str(hosts.config)]
    process = faults.start(hosts.inside(0, *words), folder)
    try:
        metrics = folder / run_dir / "metrics.jsonl"
        while process.poll() is None and steps_done(metrics) < fault.after:
            moment()
        while process.poll() is None and len(hosts.ranks(0)) + len(hosts.ranks(1)) < 4:
            moment()
        assert process.poll() is None, process.communicate()
        named, begin = strike(fault, hosts), time.monotonic()
        _, err = process.communicate(timeout=faults.MOST_SECONDS + 30)
        if process.returncode == 0:
            assert steps_done(metrics) == STEPS  # it came too late
        elif fault.kind != "coordinator":  # that one says nothing any more
            faults.assert_clear(fault, err, process.returncode, named=named, took=time.monotonic() - begin)
        assert_nothing_runs(hosts, 25)
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            hosts.link(1, "up")
        if process.poll() is None:
            process.kill()
            process.communicate()
    faults.assert_goes_on_to_equal_weights(folder, run_dir)
