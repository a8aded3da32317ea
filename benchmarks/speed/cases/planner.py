"""(g) The planner as a user meets it: fresh processes of ``autopipe plan --from-pipedream``, with and without numba."""

from __future__ import annotations

import csv
import importlib.metadata
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.speed.case import Options
from benchmarks.speed.running import AUTOPIPE, execute
from benchmarks.speed.spread import verdict

BARS = {1: 1.0, 2: 3.0}  # levels -> seconds
INSTALLS = ("without numba", "with numba")
COSTS = ("autopipe", "pipedream")  # values of --cost-model: a plan of ours, or PipeDream's formulas
DISTRIBUTION = "autopipe-train"


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


def plain_install() -> str:
    """Return which of INSTALLS an install without extras is."""
    required = importlib.metadata.requires(DISTRIBUTION) or []
    return INSTALLS[any(line.startswith("numba") and "extra ==" not in line for line in required)]


class Planner:
    """The case."""

    title = "(g) The planner in a fresh process"

    def __init__(self, options: Options) -> None:
        self.options = options
        self.seconds: dict[tuple[Golden, str, str], float] = {}  # case, cost model, install
        self.first_use = 0.0  # seconds with numba, before the others: its compiled code may not be on the disk yet
        self.cases = golden_cases(options.golden) if options.golden is not None else []
        if options.quick:
            self.cases = self.cases[:1]

    def round(self, number: int) -> None:
        """Plan every case once with each kind of install."""
        if number:
            return
        for case in self.cases[:1]:
            self.first_use = self._plan(case, COSTS[0], INSTALLS[1])
        for case in self.cases:
            for costs in COSTS:
                for install in INSTALLS:
                    self.seconds[case, costs, install] = self._plan(case, costs, install)

    def _plan(self, case: Golden, costs: str, install: str) -> float:
        folder = self.options.folder / f"golden-{Path(case.profile).stem}-{case.levels}"
        folder.mkdir(exist_ok=True)
        (folder / "cluster.toml").write_text(case.cluster(), encoding="utf-8")
        assert self.options.golden is not None
        words = ["plan", "--from-pipedream", str(self.options.golden / case.profile), "--cluster", "cluster.toml"]
        words += ["--cost-model", costs, "--work-dir", str(folder / f"{costs}-{INSTALLS.index(install)}")]
        hidden = {"AUTOPIPE_NO_NUMBA": "1"} if install == INSTALLS[0] else {}
        begin = time.perf_counter()
        execute([AUTOPIPE, *words], folder, **hidden)
        return time.perf_counter() - begin

    def lines(self) -> list[str]:
        """Return the table."""
        if not self.cases:
            return ["Not measured: no folder with PipeDream's published profiles (`--golden FOLDER`)."]
        plain = plain_install()
        lines = [
            "Wall seconds of `autopipe plan --from-pipedream FILE --cluster FILE`, from its start to its end, by",
            "both cost models: `autopipe`, the default, chooses the schedule too; `pipedream` is the",
            f"problem of the golden cases. The bars are for the plain install, {plain}. The first command with numba",
            f"took {self.first_use:.1f} s: it compiles what it needs if no earlier command has stored it.",
            "",
            "| profile | machine | costs | " + " | ".join(f"{install}, s" for install in INSTALLS) + " | bar |",
            "|---|---|---|---|---|---|",
        ]
        for (case, costs, install), seconds in self.seconds.items():
            if install != INSTALLS[0]:
                continue
            both = {install: seconds, INSTALLS[1]: self.seconds[case, costs, INSTALLS[1]]}
            bar = verdict(both[plain], BARS[case.levels], at_least=False)
            machine = "x".join(map(str, case.counts))
            cells = " | ".join(f"{value:.2f}" for value in both.values())
            lines.append(f"| {Path(case.profile).stem} | {machine} | {costs} | {cells} | {bar} |")
        return lines
