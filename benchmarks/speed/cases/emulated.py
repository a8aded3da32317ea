"""(b) Emulated compute: stages that sleep, on real ranks over gloo, against the bound of the schedule and torch's 1F1B.

The layers of ``models/sleeping.py`` are custom operators, so the command captures, measures and trains them like any
others. Two threads per rank are requested, because autopipe measures with the wall clock only if there are several: a
sleep takes no processor time. The operators themselves use one.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

from autopipe.ir.cluster import Links
from benchmarks.speed.calibrated import links_of
from benchmarks.speed.case import Options, pipeline_words
from benchmarks.speed.link import Link, measured
from benchmarks.speed.running import MODELS, execute, plan_of, prepare, same_losses, train, train_peers
from benchmarks.speed.spread import Spread, ratios, step_times, verdict

FORWARD = 0.008  # seconds
TARGET = MODELS / "sleeping.py"
SLOW = 1.5  # how many times as long the slowest stage of an unbalanced pipeline takes
OURS = ("auto", "2bw")
PREDICTION = 0.03


@dataclass(slots=True)
class Setting:
    """A pipeline and its link."""

    ranks: int
    transfer: float = 0.03  # seconds of a message, in forwards
    balanced: bool = True
    steps: int = 8
    every_round: bool = False  # else only in the first
    works: dict[str, Path] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)  # system -> seconds of a step

    @property
    def label(self) -> str:
        """The start of its rows."""
        return f"{self.ranks} | {'balanced' if self.balanced else 'unbalanced'} | {self.transfer:g}"

    @property
    def judged(self) -> bool:
        """Whether there are bars for it."""
        return self.balanced and self.transfer == 0.03 and self.ranks in (4, 8)


def settings(options: Options) -> list[Setting]:
    """Return the pipelines that are measured."""
    if options.quick:
        return [Setting(4, steps=6, every_round=True)]
    return [
        *(Setting(ranks, steps=24, every_round=True) for ranks in (4, 8)),
        *(Setting(ranks, balanced=False) for ranks in (4, 8)),
        *(Setting(ranks, transfer) for transfer in (0.1, 0.3) for ranks in (4, 8)),
        Setting(16, steps=6),
    ]


class Emulated:
    """The case."""

    title = "(b) Emulated compute: stages that sleep"

    def __init__(self, options: Options) -> None:
        self.options, self.settings = options, settings(options)
        self.link: Link | None = None
        self.links: Links | None = None  # the same, with what the runtime adds
        self.alone: list[float] = []  # seconds of a forward and a backward of one layer in one process

    def round(self, number: int) -> None:
        """Train every pipeline under every system once."""
        folder = self.options.folder
        self.link = self.link or measured(folder)
        small, large = (self.link.numbers(part * FORWARD) for part in (0.03, 0.3))
        self.links = self.links or links_of(folder / "calibration", TARGET, (small, large))
        for setting in self.settings:
            if number and not setting.every_round:
                continue
            self.alone.append(float(execute([sys.executable, "-m", "benchmarks.speed.alone"], folder)))
            ranks = setting.ranks
            work = folder / f"sleeping-{ranks}-{setting.transfer}-{setting.balanced}"
            work.mkdir(exist_ok=True)
            words = pipeline_words(ranks, 4 * ranks, 4 * ranks)
            width = self.link.numbers(setting.transfer * FORWARD)
            model = ["--arg", f"layers={ranks}", "--arg", f"width={width}"]
            model += [] if setting.balanced else ["--arg", f"slow={SLOW}"]
            profile = ["--microbatch-sizes", "1", "--threads-per-rank", "2", *model]
            if not setting.works:
                plans = {"1f1b": [*words, "--schedule", "1f1b"]}
                setting.works = prepare(work, TARGET, profile, plans, OURS, self.links)
            runs = {
                name: train(setting.works[name], TARGET, [*words, *profile, "--schedule", name], setting.steps)
                for name in OURS
            }
            spec = {"system": "1f1b", "work": str(setting.works["1f1b"]), "steps": setting.steps}
            runs["torch 1F1B"] = train_peers([spec], folder)[0]
            same_losses(runs["torch 1F1B"], runs["auto"], 1e-4, f"torch and autopipe on {ranks} ranks that sleep")
            for name, run in runs.items():
                # the last step of overlapping ones drains the pipeline
                setting.times.setdefault(name, []).extend(step_times(run.ends[:-1]))

    def lines(self) -> list[str]:
        """Return the table."""
        if self.link is None or self.links is None:
            return []
        host = self.links.host
        alone = statistics.median(self.alone)
        lines = [
            f"A stage sleeps {FORWARD * 1e3:g} ms forward and {2 * FORWARD * 1e3:g} ms backward; both together",
            f"take {alone * 1e3:.2f} ms in a process alone. m = 4p microbatches. Unbalanced: one stage takes {SLOW}",
            "times as long. The bound of a flushing schedule is the sum of the stages plus (m - 1) times the slowest,",
            "which is (m + p - 1) times one where they are equal; the steady bound of 2bw is m times the slowest.",
            f"A message over gloo takes {self.link.latency * 1e6:.0f} us and {self.link.bandwidth / 1e9:.2f} GB/s;",
            "its size is chosen so that it takes the given part of a forward. `plan` reads the figures of a message of",
            f"autopipe, {self.links.latency_seconds * 1e6:.0f} us and {self.links.bandwidth / 1e9:.2f} GB/s, and what",
            "the runtime adds to stages that sleep, measured on two ranks under 1f1b:",
            f"{host.compute_seconds * 1e6:.0f} us to a forward or backward, {host.send_seconds * 1e6:.0f} us and",
            f"{host.send_seconds_per_byte * 1e9:.2f} ns a byte to a send, {host.receive_seconds * 1e6:.0f} us to a",
            f"receive, {host.step_seconds * 1e3:.1f} ms to a minibatch, and {host.delivery_seconds * 1e6:.0f} us to",
            "the way of a message.",
            "Profiled with `--threads-per-rank 2`, so that the wall clock counts.",
            "",
            "| ranks | stages | transfer / forward | system | s a step | bound / step (quartiles) | bar | "
            "against torch (quartiles) | bar | predicted / measured | bar |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for setting in self.settings:
            for name, seconds in setting.times.items():
                lines.append(self._row(setting, name, seconds, alone))
        return lines

    def _row(self, setting: Setting, name: str, seconds: list[float], alone: float) -> str:
        p, m, slowest = setting.ranks, 4 * setting.ranks, alone * (1 if setting.balanced else SLOW)
        bound = m * slowest if name == "2bw" else (p - 1) * alone + slowest + (m - 1) * slowest
        fraction = Spread.of([bound / s for s in seconds])
        bar = verdict(fraction.middle, 0.96, at_least=True) if setting.judged and name in OURS else ""
        against, faster, predicted, exact = "", "", "", ""
        system = name
        if name in OURS:
            ratio = ratios(setting.times["torch 1F1B"], seconds)
            against = ratio.text()
            faster = verdict(ratio.middle, 1.25, at_least=True) if setting.judged and (name, p) == ("2bw", 8) else ""
            plan = plan_of(setting.works[name])
            error = plan.predicted.step_seconds / Spread.of(seconds).middle
            predicted, exact = f"{error:.3f}", verdict(abs(error - 1), PREDICTION, at_least=False)
            options = "".join(f", {key} {value}" for key, value in plan.schedule_options.items())
            system = f"autopipe {name}" + (f": {plan.schedule}{options}" if name == "auto" else options)
        cells = f"{Spread.of(seconds).middle:.4f} | {fraction.text()} | {bar} | {against} | {faster}"
        return f"| {setting.label} | {system} | {cells} | {predicted} | {exact} |"
