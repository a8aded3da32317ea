"""``make chaos-sweep``: single faults at random in a sweep of four jobs on two devices, with short leases.

===========  =======================================================================================
fault        what happens
===========  =======================================================================================
rank         SIGKILL of the rank of one job
job          SIGKILL of the process of one job, which is the parent of its ranks' server
server       SIGKILL of the server that the processes of jobs are forked from
sweep        SIGKILL of the sweep itself, which is then resumed
stop         SIGTERM or Ctrl-C, and then a resume
===========  =======================================================================================

After each, every job must be done, with the weights of training it alone, bit for bit; every finished job must not have
been trained again; and no process may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from support.commands import Commands
from support.sweeps.cases import alone, processes_in, ranks_in, weights, write_sweep
from support.waiting import short_pause, under_load

RESULT = Path("benchmarks/results/sweep_chaos.md")
KINDS = ("rank", "job", "server", "sweep", "stop")
JOBS = '[[job]]\ntarget = "model.py"\ngrid = { lr = [0.01, 0.001], seed = [1, 2] }\n'
WORDS = ("sweep", "sweep.toml", "--sweep-dir", "sweep", "--json")
STEPS, LEASE, STOPPED = 60, 0.6, 75
# the fault comes at most so long after the first job has started: most sweeps last longer
LATEST_SECONDS = 6.0
LONGEST_SECONDS = 240.0


@dataclass(frozen=True)
class Fault:
    """``after``: seconds after the first job has started; below 0: while its model is prepared."""

    seed: int
    kind: str
    after: float
    whom: int

    @classmethod
    def at_random(cls, seed: int) -> Fault:
        draw = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        early = kind in ("job", "server", "sweep", "stop") and draw.random() < 0.15
        return cls(seed, kind, -1.0 if early else draw.uniform(0.0, LATEST_SECONDS), draw.randrange(2))

    def __str__(self) -> str:
        return f"{self.kind} {'while the model is prepared' if self.after < 0 else f'after {self.after:.1f} s'}"


@dataclass
class Outcome:
    """What happened after a fault. ``why``: what should not have."""

    fault: Fault
    end: str = ""
    retries: int = 0  # leases that began again after a process was killed
    resumed: list[int] = field(default_factory=list)  # the steps from which jobs went on after the sweep was resumed
    leases: int = 0
    why: list[str] = field(default_factory=list)


def victims(folder: Path, fault: Fault, sweep: subprocess.Popen[str]) -> Iterator[psutil.Process]:
    """Yield the processes that the fault may kill, at this moment."""
    if fault.kind == "rank":
        yield from ranks_in(folder)
    elif fault.kind == "sweep":
        yield psutil.Process(sweep.pid)
    else:
        servers = [p for p in psutil.Process(sweep.pid).children() if p.children() or "forkserver" in str(p.cmdline())]
        if fault.kind == "server":
            yield from servers
        else:
            yield from (job for server in servers for job in server.children())


def strike(folder: Path, fault: Fault, sweep: subprocess.Popen[str]) -> bool:
    """Wait for the moment, and inject the fault; return False if the sweep had ended before."""
    jobs = folder / "sweep" / "jobs"
    while not (jobs.exists() if fault.after >= 0 else (folder / "sweep" / "shared").exists()):
        if sweep.poll() is not None:
            return False
        short_pause(0.01)
    time.sleep(max(fault.after, 0.0))
    while sweep.poll() is None:
        try:
            if fault.kind == "stop":
                sweep.send_signal((signal.SIGTERM, signal.SIGINT)[fault.whom])
                return True
            if processes := list(victims(folder, fault, sweep)):
                processes[fault.whom % len(processes)].kill()
                return True
        except psutil.Error:  # a process has ended meanwhile
            pass
        short_pause(0.01)
    return False


def happens(fault: Fault, folder: Path, expected: dict[int, dict[str, torch.Tensor]]) -> Outcome:
    """Run a sweep with a fault, resume it if it ended, and compare."""
    folder.mkdir()
    write_sweep(folder, JOBS, steps=STEPS, lease=LEASE)
    outcome = Outcome(fault)
    with Commands(folder, new=True) as commands:
        sweep = commands.start(*WORDS)
        came = strike(folder, fault, sweep)
        out, err = sweep.communicate(timeout=LONGEST_SECONDS)
        code = sweep.returncode
        outcome.end = f"{code}" if came else f"{code}, before the fault"
        right = {"sweep": (-9,), "stop": (STOPPED,)}.get(fault.kind, (0,)) if came else (0,)
        if code not in right:
            outcome.why.append(f"the exit code is {code}: {err[-500:]}")
        finished = done(folder)
        if code != 0:
            _gone(folder, outcome)
            again = commands.start(*WORDS, "--resume")
            out, err = again.communicate(timeout=LONGEST_SECONDS)
            if again.returncode != 0:
                outcome.why.append(f"the exit code of --resume is {again.returncode}: {err[-500:]}")
        document = json.loads(out)
        _judge(document, outcome, finished, expected, resumed=code != 0)
        _gone(folder, outcome)
    return outcome


def done(folder: Path) -> set[str]:
    """Return the jobs that sweep.json names as done."""
    path = folder / "sweep" / "sweep.json"
    jobs = json.loads(path.read_text())["jobs"] if path.exists() else []
    return {job["name"] for job in jobs if job["status"] == "done"}


def _judge(
    document: dict[str, Any],
    outcome: Outcome,
    finished: set[str],
    expected: dict[int, dict[str, torch.Tensor]],
    *,
    resumed: bool,
) -> None:
    for row in document["jobs"]:
        if row["status"] != "done" or row["step"] != STEPS:
            outcome.why.append(f"{row['name']} is {row['status']} at step {row['step']}: {row['error'][-300:]}")
            continue
        mine, other = weights(Path(row["run_dir"])), expected[row["number"]]
        if unequal := [name for name in other if name not in mine or not torch.equal(mine[name], other[name])]:
            outcome.why.append(f"{row['name']}: {unequal} differ from training alone")
    began = [event for event in document["events"] if event["what"] == "started"]
    outcome.leases = sum(row["leases"] for row in document["jobs"])
    outcome.retries = sum(event["what"] == "retried" for event in document["events"])
    if resumed:
        first = {event["job"]: event["step"] for event in reversed(began)}
        outcome.resumed = sorted(first.values())
        if again := finished & first.keys():
            outcome.why.append(f"{sorted(again)} were done, and trained again")


def _gone(folder: Path, outcome: Outcome) -> None:
    end = time.monotonic() + under_load(5)
    while (left := processes_in(folder)) and time.monotonic() < end:
        short_pause()
    if left:
        outcome.why.append(f"processes are left: {left}")


def trained_alone(folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Return the weights of each job, trained alone with ``autopipe train``."""
    folder.mkdir()
    write_sweep(folder, JOBS, steps=STEPS)
    runs = {}
    with Commands(folder, new=True) as commands:
        for number, (lr, seed) in enumerate([("0.01", 1), ("0.01", 2), ("0.001", 1), ("0.001", 2)], 1):
            words = alone(f"run{number}", "--steps", str(STEPS), "--lr", lr, "--seed", str(seed))
            commands.run(*words, seconds=LONGEST_SECONDS)
            runs[number] = weights(folder / f"run{number}")
    return runs


def written(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Return the page of results."""
    lost = sum(any("is failed" in why or "is waiting" in why for why in outcome.why) for outcome in outcomes)
    left = sum(any("processes" in why for why in outcome.why) for outcome in outcomes)
    right = sum(not outcome.why for outcome in outcomes)
    lines = [
        "# Single faults in a sweep",
        "",
        "`make chaos-sweep` writes this. One fault again: `FAULTS=1 SEED=n`.",
        "",
    ]
    lines += [
        f"Four jobs of {STEPS} steps on two devices in leases of {LEASE} s; {os.cpu_count()} cores, {seconds:.0f} s."
    ]
    lines += ["After each fault every job must be done, with the weights of `autopipe train` alone, bit for bit; no"]
    lines += ["finished job may be trained again; no process may be left.", ""]
    lines += [f"{right} of {len(outcomes)} as they should be; {lost} with lost jobs, {left} with processes left.", ""]
    lines += ["| seed | fault | exit code | leases | killed and begun again | resumed from steps | |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for outcome in outcomes:
        steps = ", ".join(map(str, outcome.resumed))
        cells = outcome.fault.seed, outcome.fault, outcome.end, outcome.leases, outcome.retries, steps
        lines.append(f"| {' | '.join(map(str, cells))} | {'; '.join(outcome.why)[:200]} |")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it, and its children
    begin, outcomes = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="sweeps-") as scratch:
        expected = trained_alone(Path(scratch) / "alone")
        for seed in range(given.seed, given.seed + given.faults):
            outcome = happens(Fault.at_random(seed), Path(scratch) / f"fault-{seed}", expected)
            outcomes.append(outcome)
            print("ok  " if not outcome.why else "FAIL", seed, outcome.fault, outcome.end, *outcome.why, flush=True)
    if given.faults > 1:
        RESULT.write_text(written(outcomes, time.monotonic() - begin))
    return int(any(outcome.why for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
