"""(c) Host cost: processor time of all ranks for each instruction and message, with stages that compute nothing."""

from __future__ import annotations

import itertools
from pathlib import Path

from benchmarks.speed.case import Options, pipeline_words
from benchmarks.speed.meter import Reading
from benchmarks.speed.running import MODELS, prepare, same_losses, train, train_peers
from benchmarks.speed.spread import BLOCKS, Spread, ratios, step_times, verdict

TARGET = MODELS / "empty.py"
WARM_UP = 3
SYSTEMS = ("autopipe 1f1b", "torch 1F1B")


def processor_times(ranks: list[list[Reading]]) -> list[float]:
    """Return the processor seconds of a step, of all ranks, as means of some blocks of consecutive steps."""
    last = min(len(rank) for rank in ranks) - 1
    count = min(BLOCKS, last - WARM_UP)
    edges = [WARM_UP + round(index * (last - WARM_UP) / count) for index in range(count + 1)]
    return [
        sum(rank[b].processor - rank[a].processor for rank in ranks) / (b - a) for a, b in itertools.pairwise(edges)
    ]


class HostCost:
    """The case. ``ranks``, ``microbatches``: of the pipeline."""

    title = "(c) Host cost, empty stages"

    def __init__(self, options: Options, ranks: int = 4, microbatches: int = 16) -> None:
        self.options, self.ranks, self.microbatches = options, ranks, microbatches
        self.work: Path | None = None
        self.processor: dict[str, list[float]] = {name: [] for name in SYSTEMS}
        self.wall: dict[str, list[float]] = {name: [] for name in SYSTEMS}

    def round(self, number: int) -> None:
        """Train once under each system."""
        words = [*pipeline_words(self.ranks, self.microbatches, self.microbatches), "--schedule", "1f1b"]
        profile = ["--microbatch-sizes", "1", "--arg", f"layers={self.ranks}"]
        if self.work is None:
            folder = self.options.folder / f"empty-{self.ranks}"
            self.work = prepare(folder, TARGET, profile, {"1f1b": words})["1f1b"]
        steps = self.options.steps(80, 12)
        spec = {"system": "1f1b", "work": str(self.work), "steps": steps}
        runs = {SYSTEMS[0]: train(self.work, TARGET, [*words, *profile], steps)}
        runs[SYSTEMS[1]] = train_peers([spec], self.options.folder)[0]
        same_losses(runs[SYSTEMS[1]], runs[SYSTEMS[0]], 1e-4, "torch and autopipe on empty stages")
        for name, run in runs.items():
            if len(run.ranks) != self.ranks:
                raise SystemExit(f"{name}: {len(run.ranks)} of {self.ranks} ranks measured themselves")
            self.processor[name] += processor_times(run.ranks)
            self.wall[name] += step_times(run.ends, WARM_UP)

    def lines(self) -> list[str]:
        """Return the table."""
        p, m = self.ranks, self.microbatches
        instructions, messages = p * (2 * m + 1), 2 * m * (p - 1)
        lines = [
            f"{p} ranks, {m} microbatches: {instructions} instructions (forward, backward, step) and {messages}",
            "messages (activations and gradients) a step. User and system time of all rank processes, not of their",
            "start.",
            "",
            "| system | processor us a microbatch (quartiles) | us an instruction | us a message | wall ms a step |",
            "|---|---|---|---|---|",
        ]
        for name in SYSTEMS:
            total = Spread.of([s * 1e6 / m for s in self.processor[name]])
            each = f"{total.middle * m / instructions:.0f} | {total.middle * m / messages:.0f}"
            wall = Spread.of([s * 1e3 for s in self.wall[name]])
            lines.append(f"| {name} | {total.text('.0f')} | {each} | {wall.text('.1f')} |")
        ratio = ratios(*(self.processor[name] for name in SYSTEMS))
        bar = verdict(ratio.middle, 0.6, at_least=False)
        return [*lines, "", f"autopipe over torch, per microbatch: {ratio.text()}; bar {bar}."]
