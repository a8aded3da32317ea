"""(g) The planner as a user meets it: fresh processes of ``autopipe plan`` with PipeDream's published profiles."""

from __future__ import annotations

import csv
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from autopipe.ir import artifact
from benchmarks.pipedream.profile import profile_from_pipedream
from benchmarks.speed.case import Options
from benchmarks.speed.running import AUTOPIPE, execute

LEVELS = (1, 2)
SAMPLES = 4  # in a minibatch, for each device


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
        if case.levels in LEVELS and (before is None or sum(counts) > sum(before.counts)):
            largest[case.profile, case.levels] = case
    return list(largest.values())


class Planner:
    """The case."""

    title = "(g) The planner in a fresh process"

    def __init__(self, options: Options) -> None:
        self.options = options
        self.seconds: dict[Golden, list[float]] = {}  # of each round
        self.cases = golden_cases(options.golden) if options.golden is not None else []
        if options.quick:
            self.cases = self.cases[:1]

    def round(self, number: int) -> None:
        """Plan every case once."""
        for case in self.cases:
            self.seconds.setdefault(case, []).append(self._plan(case))

    def _plan(self, case: Golden) -> float:
        folder = self.options.folder / f"golden-{Path(case.profile).stem}-{case.levels}"
        folder.mkdir(exist_ok=True)
        (folder / "cluster.toml").write_text(case.cluster(), encoding="utf-8")
        assert self.options.golden is not None
        artifact.save(profile_from_pipedream(self.options.golden / case.profile), folder / "work" / "profile.json")
        batch = str(SAMPLES * math.prod(case.counts))
        words = ["plan", "--cluster", "cluster.toml", "--batch-size", batch, "--work-dir", "work"]
        begin = time.perf_counter()
        execute([AUTOPIPE, *words], folder)
        return time.perf_counter() - begin

    def lines(self) -> list[str]:
        """Return the table."""
        if not self.cases:
            return ["Not measured: no folder with PipeDream's published profiles (`--golden FOLDER`)."]
        lines = [
            "Wall seconds of `autopipe plan --cluster FILE` from a stored profile, from its start to its end.",
            "",
            "| profile | machine | median, s |",
            "|---|---|---|",
        ]
        for case, seconds in self.seconds.items():
            machine = "x".join(map(str, case.counts))
            lines.append(f"| {Path(case.profile).stem} | {machine} | {statistics.median(seconds):.2f} |")
        return lines
