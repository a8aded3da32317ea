"""Single faults, at random, on two hosts: each is named, ends everything in time, and the run goes on to equal weights.

``AUTOPIPE_FAULTS`` says how many, ``AUTOPIPE_FAULTS_SEED`` which ones; ``make chaos`` asks for many.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from two_hosts import Hosts, two_hosts, why_not

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts"),
    pytest.mark.timeout(300),
]
AUTOPIPE = str(Path(sys.executable).with_name("autopipe"))
COUNT = int(os.environ.get("AUTOPIPE_FAULTS", "4"))
SEED = int(os.environ.get("AUTOPIPE_FAULTS_SEED", "0"))
STEPS, WATCHDOG = 60, 8.0
MODEL = """
import select
import torch
from torch import nn

def build_model():
    layers = [layer for _ in range(6) for layer in (nn.Linear(24, 24), nn.Tanh())]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(24, 1))

def loss(output, target):
    return (output - target).pow(2).mean()

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for step in range(60):
        select.select([], [], [], 0.05)  # a run of a few seconds
        yield torch.randn(batch_size, 24, generator=g), torch.randn(batch_size, 1, generator=g)
"""
OPTIONS = ["--device", "cpu", "--batch-size", "8", "--num-microbatches", "4", "--schedule", "1f1b"]
# what is done to whom
TO_RANKS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "SIGABRT": signal.SIGABRT, "SIGSTOP": signal.SIGSTOP}
TO_HOSTS = ("agent", "fork server", "ssh client", "link", "coordinator")


@dataclass(frozen=True)
class Fault:
    """``kind``: a signal for rank ``whom``, or something that happens to host ``whom``. ``after``: how many steps."""

    kind: str
    whom: int
    after: int

    @staticmethod
    def at_random(number: int) -> Fault:
        chance = random.Random(SEED * 1000 + number)
        kind = chance.choice([*TO_RANKS, *TO_HOSTS])
        whom = chance.randrange(4) if kind in TO_RANKS else 1 if kind in ("link", "ssh client") else chance.randrange(2)
        return Fault(kind, whom, chance.choice([0, 1, 5, 17, 30]))

    def __str__(self) -> str:
        return f"{self.kind} {self.whom} after {self.after}"

    def strike(self, hosts: Hosts) -> None:
        if self.kind in TO_RANKS:
            hosts.ranks(self.whom // 2)[self.whom].send_signal(TO_RANKS[self.kind])
        elif self.kind == "agent":
            hosts.agent(self.whom).kill()
        elif self.kind == "fork server":
            agent = hosts.agent(self.whom)
            servers = [p for p in agent.children() if "forkserver" in " ".join(p.cmdline())]
            servers[0].kill()
        elif self.kind == "ssh client":
            next(p for p in hosts.processes(0) if p.name() == "ssh" and f"h{self.whom}" in p.cmdline()).kill()
        elif self.kind == "link":
            hosts.link(self.whom, "down")
        else:
            next(p for p in hosts.processes(0) if "--run-dir" in p.cmdline() and p.name() != "ssh").kill()

    def is_named_in(self, said: str) -> bool:
        if self.kind == "coordinator":
            return True  # it was killed: it says nothing
        if self.kind in TO_RANKS:
            return f"at: rank {self.whom} on h{self.whom // 2}" in said
        return f"h{self.whom}" in said.partition("Error:")[2]


def moment() -> None:
    select.select([], [], [], 0.05)


def run(*words: str, folder: Path) -> None:
    done = subprocess.run(
        [AUTOPIPE, *words], cwd=folder, capture_output=True, text=True, timeout=200, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts") / "ssh") as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plan, and the weights of a run that nothing happened to."""
    path = tmp_path_factory.mktemp("work")
    (path / "model.py").write_text(MODEL)
    run("plan", "model.py", "--gpus", "4", *OPTIONS, folder=path)
    run("train", "--steps", str(STEPS), "--run-dir", "undisturbed", folder=path)
    run("export", "undisturbed", "-o", "undisturbed.pt", folder=path)
    return path


def steps_done(metrics: Path) -> int:
    return metrics.read_text().count('"loss"') if metrics.is_file() else 0


def assert_nothing_runs(hosts: Hosts, seconds: float) -> None:
    end = time.monotonic() + seconds
    left: list[psutil.Process] = [*hosts.processes(0), *hosts.processes(1)]
    while left:
        assert time.monotonic() < end, [p.cmdline() for p in left]
        moment()
        left = [*hosts.processes(0), *hosts.processes(1)]


@pytest.mark.parametrize("number", range(COUNT), ids=lambda number: str(Fault.at_random(number)))
def test_a_fault_is_named_and_the_run_goes_on_to_equal_weights(hosts: Hosts, folder: Path, number: int) -> None:
    fault, run_dir = Fault.at_random(number), f"run-{number}"
    slots = ",".join(f"{name}:2" for name in hosts.names)
    words = ["train", "--run-dir", run_dir, "--steps", str(STEPS), "--checkpoint-every", "7"]
    words += ["--watchdog", str(WATCHDOG), "--hosts", slots, "--ssh-config", str(hosts.config)]
    process = subprocess.Popen(
        hosts.inside(0, AUTOPIPE, *words),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        metrics = folder / run_dir / "metrics.jsonl"
        while process.poll() is None and steps_done(metrics) < fault.after:
            moment()
        while process.poll() is None and len(hosts.ranks(0)) + len(hosts.ranks(1)) < 4:
            moment()
        assert process.poll() is None, process.communicate()
        fault.strike(hosts)
        begin = time.monotonic()
        _, err = process.communicate(timeout=WATCHDOG + 40)
        took = time.monotonic() - begin
        if process.returncode == 0:
            assert steps_done(metrics) == STEPS  # it came too late
        else:
            said = " ".join(err.split())
            assert "Traceback" not in err and "bug in autopipe" not in err
            assert fault.kind == "coordinator" or (process.returncode in (1, 3) and "Error:" in err), err
            assert fault.is_named_in(said), said
            assert took < WATCHDOG + 10, took
        assert_nothing_runs(hosts, 25)
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            hosts.link(1, "up")
        if process.poll() is None:
            process.kill()
            process.communicate()
    resume = ["--resume"] if (folder / run_dir / "checkpoints" / "latest").is_file() else []
    run("train", "--steps", str(STEPS), "--run-dir", run_dir, *resume, folder=folder)
    run("export", run_dir, "-o", f"{run_dir}.pt", folder=folder)
    ours, theirs = torch.load(folder / "undisturbed.pt"), torch.load(folder / f"{run_dir}.pt")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
