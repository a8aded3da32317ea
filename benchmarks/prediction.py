"""Predicted and measured step time: two CPU ranks with one thread each, every sample model, gpipe and 1f1b.

Each round measures the links, profiles each model as a user would, and trains it under each schedule for some seconds,
without the first two steps. The prediction is that of the plan, computed before the training. A round covers all
models, so that a slow minute of the machine affects one round of each. Reports medians over the rounds, because a core
that is shared with another virtual machine changes its speed by up to a half every few seconds. The variation of one
fixed convolution is written above the table in benchmarks/results/prediction.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import autopipe
from autopipe.commands.calibration import links

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results" / "prediction.md"
SCHEDULES = ("gpipe", "1f1b")
WARM_UP = 2
LEAST_STEPS, MOST_STEPS = 8, 200


@dataclass(slots=True)
class Case:
    """One model under one schedule."""

    model: str
    schedule: str
    predicted: list[float] = field(default_factory=list)  # seconds per step, by round
    measured: list[float] = field(default_factory=list)  # seconds per step, by round
    failure: str = ""

    @property
    def medians(self) -> tuple[float, float]:
        """The median prediction and the median measurement."""
        return statistics.median(self.predicted), statistics.median(self.measured)

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        predicted, measured = self.medians
        return predicted / measured - 1


class CoreSpeed:
    """Repeated times of a fixed convolution on each core."""

    def __init__(self) -> None:
        self.microseconds: list[float] = []
        self._layer, self._images = torch.nn.Conv2d(16, 16, 3, padding=1), torch.randn(8, 16, 16, 16)

    def measure(self, seconds: float = 0.2) -> None:
        """Time the convolution on each core."""
        cores = os.sched_getaffinity(0)
        for core in cores:
            os.sched_setaffinity(0, {core})
            begin, calls = time.perf_counter(), 0
            while time.perf_counter() - begin < seconds:
                self._layer(self._images)
                calls += 1
            self.microseconds.append((time.perf_counter() - begin) / calls * 1e6)
        os.sched_setaffinity(0, cores)


def train(pipe: autopipe.Pipeline, num_steps: int) -> tuple[float, float]:
    """Train, and return the predicted and the median seconds per step."""
    ends: list[float] = []
    predicted: list[float] = []

    def listen(kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "plan":
            predicted.append(fields["plan"].predicted.step_seconds)
        elif kind == "step":
            ends.append(fields["seconds"])

    pipe.train(steps=num_steps + WARM_UP, check=False, on_event=listen)
    return predicted[0], statistics.median(b - a for a, b in itertools.pairwise(ends[WARM_UP - 1 :]))


def one_round(
    folder: Path, targets: list[Path], cases: dict[tuple[str, str], Case], options: argparse.Namespace
) -> None:
    """Measure the links, then profile each model and train it under both schedules."""
    links.measure(folder, "cpu")
    size = -(-options.batch_size // options.num_microbatches)
    for target in targets:
        measurement = {"work_dir": folder, "device": "cpu", "microbatch_sizes": sorted({1, size}), "no_verify": True}
        own = [cases[target.stem, schedule] for schedule in SCHEDULES]
        try:
            autopipe.Pipeline(target, **measurement).profile()
            for case in own:
                pipe = autopipe.Pipeline(
                    target,
                    **measurement,
                    gpus=2,
                    replicas="never",
                    batch_size=options.batch_size,
                    schedule=case.schedule,
                    num_microbatches=options.num_microbatches,
                )
                before = statistics.median(case.measured) if case.measured else options.seconds
                num_steps = min(max(round(options.seconds / before), LEAST_STEPS), MOST_STEPS)
                predicted, measured = train(pipe, num_steps)
                case.predicted.append(predicted)
                case.measured.append(measured)
                text = f"{case.model:14} {case.schedule:6} predicted {predicted:.4f} s, took {measured:.4f} s"
                print(text, flush=True)
        except autopipe.AutopipeError as failed:
            for case in own:
                case.failure = failed.what
            print(f"{target.stem}: {failed}", flush=True)


def table(cases: list[Case], options: argparse.Namespace, speed: CoreSpeed, rounds: int) -> str:
    """Return the result as Markdown."""
    low, middle, high = statistics.quantiles(speed.microseconds, n=4)
    lines = [
        "# Predicted against measured step time",
        "",
        f"Two ranks of one thread, minibatch {options.batch_size}, {options.num_microbatches} microbatches; "
        f"{rounds} rounds, each with new links and profiles, and about {options.seconds:g} s of training per case.",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, CPU.",
        f"One fixed convolution took {middle:.0f} us in the median, {low:.0f} to {high:.0f} us between the quartiles, "
        f"{min(speed.microseconds):.0f} to {max(speed.microseconds):.0f} us in all: "
        "the variation of the machine itself.",
        "",
        "| model | schedule | predicted s | measured s | error |",
        "|---|---|---|---|---|",
    ]
    for case in cases:
        if case.measured:
            predicted, measured = case.medians
            cells = f"{predicted:.4f} | {measured:.4f} | {case.error:+.1%}"
        else:
            cells = f"| not run: {case.failure} |"
        lines.append(f"| {case.model} | {case.schedule} | {cells} |")
    errors = [abs(case.error) for case in cases if case.measured]
    if errors:
        text = f"Median error {statistics.median(errors):.1%}, worst {max(errors):.1%}, {len(errors)} cases."
        lines += ["", text]
    return "\n".join([*lines, ""])


def main() -> None:
    """Run the measurements, print the results and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[], help="names of sample models [default: all]")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0, help="of training per round and case")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    targets = sorted((ROOT / "sample_models").glob("*.py"))
    chosen = [target for target in targets if not options.models or target.stem in options.models]
    cases = {(target.stem, schedule): Case(target.stem, schedule) for target in chosen for schedule in SCHEDULES}
    speed = CoreSpeed()
    torch.set_num_threads(1)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    for number in range(options.rounds):
        speed.measure()
        with tempfile.TemporaryDirectory() as folder:
            one_round(Path(folder), chosen, cases, options)
        text = table(list(cases.values()), options, speed, number + 1)
        RESULTS.write_text(text, encoding="utf-8")  # after each round, because a user may stop the benchmark
    print(text)


if __name__ == "__main__":
    main()
