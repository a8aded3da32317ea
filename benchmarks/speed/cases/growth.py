"""(f) Growth over ranks, microbatches, bytes of a message, parameters, and steps, with stages that compute nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.speed.case import Options, pipeline_words
from benchmarks.speed.cases.host_cost import WARM_UP, processor_times
from benchmarks.speed.running import MODELS, Run, prepare, train
from benchmarks.speed.spread import Spread, ratios, step_times, verdict

TARGET = MODELS / "empty.py"
LONG, SHORT = 2000, 200  # steps
FLAT_TIME, FLAT_MEMORY = 1.05, 1.02  # what counts as no growth over the steps


@dataclass(frozen=True, slots=True)
class Size:
    """One run."""

    ranks: int = 2
    microbatches: int = 8
    width: int = 1  # float32 numbers of a message
    parameters: int = 1  # of a layer

    @property
    def instructions(self) -> int:
        """Forwards, backwards and steps of a minibatch."""
        return self.ranks * (2 * self.microbatches + 1)


BASE = Size()
SERIES: dict[str, tuple[Size, ...]] = {
    "ranks": tuple(replace(BASE, ranks=n) for n in (2, 4, 8, 16)),
    "microbatches": tuple(replace(BASE, microbatches=n) for n in (8, 64)),
    "width": tuple(replace(BASE, width=n) for n in (1, 2**14, 2**18)),
    "parameters": tuple(replace(BASE, parameters=n) for n in (1, 2**20)),
}
NAMES = {
    "ranks": "ranks",
    "microbatches": "microbatches",
    "width": "numbers of a message",
    "parameters": "parameters of a stage",
}


@dataclass(slots=True)
class Measured:
    """What was measured of a size."""

    wall: list[float] = field(default_factory=list)  # seconds of a step
    processor: list[float] = field(default_factory=list)  # seconds of a step, all ranks


class Growth:
    """The case."""

    title = "(f) Growth"

    def __init__(self, options: Options) -> None:
        self.options = options
        self.series = {"microbatches": SERIES["microbatches"]} if options.quick else SERIES
        self.long = SHORT if options.quick else LONG
        self.works: dict[Size, Path] = {}
        self.rows: dict[Size, Measured] = {}
        self.long_run: Run | None = None

    def round(self, number: int) -> None:
        """Train every size once, and, in the first round, one for many steps."""
        if number:
            return
        for size in dict.fromkeys(size for sizes in self.series.values() for size in sizes):
            run = self._train(size, self.options.steps(24, 10))
            row = self.rows.setdefault(size, Measured())
            row.wall += step_times(run.ends, WARM_UP)
            row.processor += processor_times(run.ranks)
        self.long_run = self._train(BASE, self.long)

    def _train(self, size: Size, steps: int) -> Run:
        words = [*pipeline_words(size.ranks, size.microbatches, size.microbatches), "--schedule", "1f1b"]
        profile = ["--microbatch-sizes", "1", "--arg", f"layers={size.ranks}"]
        profile += ["--arg", f"width={size.width}", "--arg", f"parameters={size.parameters}"]
        if size not in self.works:
            folder = self.options.folder / f"growth-{len(self.works)}"
            self.works[size] = prepare(folder, TARGET, profile, {}, ["work"])["work"]
        return train(self.works[size], TARGET, [*words, *profile], steps)

    def lines(self) -> list[str]:
        """Return the table."""
        lines = [
            f"1f1b, one rank per stage, {BASE.ranks} ranks and {BASE.microbatches} microbatches if not said otherwise.",
            "",
            "| grows | value | wall ms a step (quartiles) | processor us an instruction (quartiles) | over the first |",
            "|---|---|---|---|---|",
        ]
        for name, sizes in self.series.items():
            first = 0.0
            for size in sizes:
                if size not in self.rows:
                    continue
                row = self.rows[size]
                wall = Spread.of([s * 1e3 for s in row.wall])
                each = Spread.of([s * 1e6 / size.instructions for s in row.processor])
                first = first or each.middle
                cells = f"{getattr(size, name)} | {wall.text('.2f')} | {each.text('.0f')} | {each.middle / first:.2f}"
                lines.append(f"| {NAMES[name]} | {cells} |")
        return lines if self.long_run is None else [*lines, "", *self._steps(self.long_run)]

    def _steps(self, run: Run) -> list[str]:
        tenth = len(run.ends) // 10
        early, late = run.ends[WARM_UP : tenth + WARM_UP + 1], run.ends[-tenth - 1 :]
        ratio = ratios(step_times(late, 0), step_times(early, 0))
        memory = [[reading.memory for reading in rank if reading.memory] for rank in run.ranks]
        # the first tenth allocates what later steps use again
        grown = max(rank[-1] / rank[max(len(rank) // 10, 1)] for rank in memory)
        most = max(max(rank) for rank in memory) / 2**20
        return [
            f"{len(run.ends)} steps: a step of the last tenth over one of the first {ratio.text()}, "
            f"bar {verdict(ratio.middle, FLAT_TIME, at_least=False)}; "
            f"memory of a rank at the end over that after the first tenth {grown:.3f} at most ({most:.0f} MiB), "
            f"bar {verdict(grown, FLAT_MEMORY, at_least=False)}."
        ]
