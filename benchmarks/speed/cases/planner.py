"""(g) The planner as a user meets it: fresh processes of ``autopipe plan --from-pipedream``."""

from __future__ import annotations

import csv
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.speed.case import Options
from benchmarks.speed.running import AUTOPIPE, execute
from benchmarks.speed.spread import verdict

BARS = {1: 1.0, 2: 3.0}  # levels -> seconds
COSTS = ("autopipe", "pipedream")  # values of --cost-model: a plan of ours, or PipeDream's formulas


@dataclass(frozen=True, slots=True)
class Golden:
    """A profile and a machine."""

    profile: str  # a file name
    counts: tuple[int, ...]  # of each level, innermost first
    bandwidths: tuple[str, ...]  # GB/s

    @property
    def levels(self) -> int:
        """The number of levels of links."""
        return len(self.counts)

    def cluster(self) -> str:
        """Return the text of its cluster file."""
        text = '[device]\nname = "a device of PipeDream"\nmemory = "16GiB"\n'
        for level, (count, bandwidth) in enumerate(zip(self.counts, self.bandwidths, strict=True)):
            text += f'[[level]]\nname = "level {level}"\ncount = {count}\nbandwidth = "{bandwidth}GB/s"\n'
        return text


def golden_cases(folder: Path) -> list[Golden]:
    """Return the largest machine of one level and of two levels for each profile of ``golden.csv``."""
    with (folder / "golden.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    largest: dict[tuple[str, int], Golden] = {}
    for row in rows:
        counts = tuple(int(count) for count in row["level_sizes"].split("x"))
        case = Golden(row["profile"], counts, tuple(row["bandwidths_GBps"].split("/")))
        before = largest.get((case.profile, case.levels))
        if case.levels in BARS and (before is None or sum(counts) > sum(before.counts)):
            largest[case.profile, case.levels] = case
    return list(largest.values())


class Planner:
    """The case."""

    title = "(g) The planner in a fresh process"

    def __init__(self, options: Options) -> None:
        self.options = options
        self.seconds: dict[tuple[Golden, str], list[float]] = {}  # case, cost model -> of each round
        self.cases = golden_cases(options.golden) if options.golden is not None else []
        if options.quick:
            self.cases = self.cases[:1]

    def round(self, number: int) -> None:
        """Plan every case once by each cost model."""
        for case in self.cases:
            for costs in COSTS:
                self.seconds.setdefault((case, costs), []).append(self._plan(case, costs))

    def _plan(self, case: Golden, costs: str) -> float:
        folder = self.options.folder / f"golden-{Path(case.profile).stem}-{case.levels}"
        folder.mkdir(exist_ok=True)
        (folder / "cluster.toml").write_text(case.cluster(), encoding="utf-8")
        assert self.options.golden is not None
        words = ["plan", "--from-pipedream", str(self.options.golden / case.profile), "--cluster", "cluster.toml"]
        begin = time.perf_counter()
        execute([AUTOPIPE, *words, "--cost-model", costs, "--work-dir", str(folder / costs)], folder)
        return time.perf_counter() - begin

    def lines(self) -> list[str]:
        """Return the table."""
        if not self.cases:
            return ["Not measured: no folder with PipeDream's published profiles (`--golden FOLDER`)."]
        lines = [
            "Wall seconds of `autopipe plan --from-pipedream FILE --cluster FILE`, from its start to its end, by",
            "both cost models: `autopipe`, the default, chooses the schedule too; `pipedream` is the problem of the",
            "golden cases, to which the bars belong. `make bench-planner` plans all of them.",
            "",
            "| profile | machine | costs | median, s | bar |",
            "|---|---|---|---|---|",
        ]
        for (case, costs), seconds in self.seconds.items():
            middle = statistics.median(seconds)
            bar = verdict(middle, BARS[case.levels], at_least=False) if costs == COSTS[1] else ""
            machine = "x".join(map(str, case.counts))
            lines.append(f"| {Path(case.profile).stem} | {machine} | {costs} | {middle:.2f} | {bar} |")
        return lines
