"""``make chaos``: many cases, and the properties that held in each, in benchmarks/results/chaos.md."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from support.chaos.case import MOST_SECONDS, WATCHDOG, Case
from support.chaos.judge import PROPERTIES, Outcome, happens, prepared, weights
from support.chaos.scene import Scene, can_mount
from support.hosts.two_hosts import two_hosts, why_not

RESULT = Path("benchmarks/results/chaos.md")


class Grounds:
    """The undisturbed runs, one for every plan, each trained when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[tuple[int, str], tuple[Path, dict[str, torch.Tensor]]] = {}
        self._locks: dict[tuple[int, str], threading.Lock] = {}

    def of(self, ranks: int, schedule: str) -> tuple[Path, dict[str, torch.Tensor]]:
        key = ranks, schedule
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self._made:
                base = next((path for path, _ in list(self._made.values())), None)
                pipeline = prepared(self.folder / f"undisturbed-{ranks}-{schedule}", ranks, schedule, base)
                self._made[key] = pipeline, weights(pipeline / "run")
            return self._made[key]


def one(case: Case, grounds: Grounds, hosts: Any = None) -> Outcome:
    base, undisturbed = grounds.of(case.ranks, case.schedule)
    folder = grounds.folder / f"{'hosts' if case.hosts else 'here'}-{case.seed}"
    folder.mkdir()
    outcome = happens(Scene(folder, case, base, hosts), undisturbed)
    line = f"{'ok  ' if outcome.passed else 'FAIL'} seed {case.seed}: {case} -> {outcome.end}, {outcome.seconds:.1f} s"
    print("\n".join([line, *(f"     {why}" for why in outcome.why)]), flush=True)
    return outcome


def table(outcomes: Sequence[Outcome]) -> list[str]:
    lines = ["| property | held | of |", "|---|---|---|"]
    for name in PROPERTIES:
        judged = [outcome.judged[name] for outcome in outcomes if name in outcome.judged]
        if judged:
            lines.append(f"| {name} | {sum(judged)} | {len(judged)} |")
    slowest = max((outcome.seconds for outcome in outcomes if "time" in outcome.judged), default=0.0)
    late = sum(outcome.end == "the run had ended before" for outcome in outcomes)
    lines += ["", f"Slowest from the fault to the end or the restart: {slowest:.1f} s. Came too late: {late}.", ""]
    lines += ["| seed | fault | ended | seconds | |", "|---|---|---|---|---|"]
    for outcome in sorted(outcomes, key=lambda outcome: outcome.case.seed):
        failed = ", ".join(name for name, passed in outcome.judged.items() if not passed)
        verdict = f"**{failed}**" if failed else ""
        lines.append(f"| {outcome.case.seed} | {outcome.case} | {outcome.end} | {outcome.seconds:.1f} | {verdict} |")
    return [*lines, ""]


def written(here: Sequence[Outcome], there: Sequence[Outcome], notes: Sequence[str], seconds: float) -> str:
    lines = ["# Single faults at random", "", "`make chaos` writes this. One case again: `make chaos FAULTS=1 SEED=n`,"]
    lines += ["of those on two hosts: `make chaos FAULTS=0 HOST_FAULTS=1 SEED=n`.", ""]
    lines += [f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, {seconds / 60:.0f} minutes."]
    lines += [f"Watchdog {WATCHDOG:.0f} s; a run must have ended within {WATCHDOG + MOST_SECONDS:.0f} s of its fault."]
    lines += ["The clock jumps in Python only (a sitecustomize), which is all that autopipe asks the time.", *notes, ""]
    for title, outcomes in (("This machine", here), ("Two hosts by ssh", there)):
        if outcomes:
            passed = sum(outcome.passed for outcome in outcomes)
            lines += [f"## {title}: {passed} of {len(outcomes)} as they should be", "", *table(outcomes)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="single faults at random")
    for name, value in (("faults", 100), ("host-faults", 30), ("seed", 0), ("jobs", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no further case after so long; 0: no limit")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    begin = time.monotonic()
    notes: list[str] = []
    here: list[Outcome] = []
    there: list[Outcome] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # hosts and mounts are removed

    def report() -> None:
        if given.faults + given.host_faults > 1:  # a single case is a repetition, not a result
            given.output.write_text(written(here, there, notes, time.monotonic() - begin))

    def try_one(case: Case, hosts: Any = None) -> None:
        if given.minutes and time.monotonic() - begin > given.minutes * 60:
            return
        (there if case.hosts else here).append(one(case, grounds, hosts))
        report()

    with contextlib.ExitStack() as stack:
        grounds = Grounds(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autopipe-chaos-"))))
        cases = [Case.at_random(seed) for seed in range(given.seed, given.seed + given.faults)]
        if not can_mount():
            notes.append("Nothing can be mounted here: no full and no read-only disk among the cases.")
            cases = [case for case in cases if case.kind not in ("disk full", "read-only")]
        with ThreadPoolExecutor(given.jobs) as jobs:
            list(jobs.map(try_one, cases))
        if given.host_faults and why_not():
            notes.append(f"No case on two hosts: {why_not()}.")
        elif given.host_faults:
            hosts = stack.enter_context(two_hosts(grounds.folder / "ssh"))
            for seed in range(given.seed, given.seed + given.host_faults):
                try_one(Case.at_random(seed, hosts=True), hosts)
        report()
    return 0 if all(outcome.passed for outcome in (*here, *there)) else 1


if __name__ == "__main__":
    sys.exit(main())
