"""Predicted against measured step time: two CPU ranks, one thread each, every sample model, gpipe and 1f1b.

Profile and links are measured first, as a user would with ``profile --links``; the prediction is the plan's own, made
before anything runs. Rounds alternate between the schedules; a round's figure is the median step, the first two steps
left out, and medians over the rounds are quoted. Other programs make every figure worse: the load of the machine,
measured while nothing of this benchmark runs, is written beside them. Writes benchmarks/results/prediction.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autopipe.errors import AutopipeError
from autopipe.workflow import links, runs, steps
from autopipe.workflow.settings import ModelSettings, PlanSettings, ProfileSettings, TrainSettings

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results" / "prediction.md"
SCHEDULES = ("gpipe", "1f1b")
WARM_UP = 2


@dataclass(slots=True)
class Case:
    """One model under one schedule. Seconds a step; ``loads``: of the machine before each round."""

    model: str
    schedule: str
    predicted: float = 0.0
    measured: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def error(self) -> float:
        """How far the prediction is off, as a part of what was measured."""
        return self.predicted / statistics.median(self.measured) - 1


def train(case: Case, settings: PlanSettings, num_steps: int) -> None:
    """Train a few steps, and add the prediction and the median step to the case."""
    ends: list[float] = []

    def listen(kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "plan":
            case.predicted = fields["plan"].predicted.step_seconds
        elif kind == "step":
            ends.append(fields["seconds"])

    case.loads.append(os.getloadavg()[0])
    runs.train(TrainSettings(settings, steps=num_steps + WARM_UP, check_first=False), listen)
    case.measured.append(statistics.median(b - a for a, b in itertools.pairwise(ends[WARM_UP - 1 :])))


def model_cases(target: Path, options: argparse.Namespace) -> list[Case]:
    """Profile one model and run it under both schedules."""
    cases = [Case(target.stem, schedule) for schedule in SCHEDULES]
    size = -(-options.batch_size // options.num_microbatches)
    with tempfile.TemporaryDirectory() as folder:
        sizes = tuple(sorted({1, size}))
        profile = ProfileSettings(ModelSettings(str(target)), Path(folder), "cpu", sizes, 1, verify=False)
        links.measure(Path(folder), "cpu")
        try:
            steps.profile(profile)
            for _, case in itertools.product(range(options.rounds), cases):
                plan = PlanSettings(
                    profile,
                    gpus=2,
                    batch_size=options.batch_size,
                    schedule=case.schedule,
                    num_microbatches=options.num_microbatches,
                )
                train(case, plan, options.steps)
                print(
                    f"{case.model:14} {case.schedule:6} predicted {case.predicted:.4f} s, "
                    f"measured {case.measured[-1]:.4f} s, load {case.loads[-1]:.1f}",
                    flush=True,
                )
        except AutopipeError as error:
            for case in cases:
                case.failure = error.what
            print(f"{target.stem}: {error}", flush=True)
    return cases


def table(cases: list[Case], options: argparse.Namespace) -> str:
    """Return the result as Markdown."""
    done = [case for case in cases if case.measured]
    lines = [
        "# Predicted against measured step time",
        "",
        f"Two ranks of one thread, minibatch {options.batch_size}, {options.num_microbatches} microbatches; medians of "
        f"{options.rounds} rounds of {options.steps} steps.",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, CPU. "
        "*Load*: of the machine before each round, median; what else runs takes from the ranks.",
        "",
        "| model | schedule | predicted s | measured s | error | load |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        if not case.measured:
            lines.append(f"| {case.model} | {case.schedule} | | | not run: {case.failure} | |")
            continue
        middle, load = statistics.median(case.measured), statistics.median(case.loads)
        lines.append(
            f"| {case.model} | {case.schedule} | {case.predicted:.4f} | {middle:.4f} | {case.error:+.1%} | {load:.1f} |"
        )
    if done:
        errors = [abs(case.error) for case in done]
        lines += ["", f"Median error {statistics.median(errors):.1%}, worst {max(errors):.1%}, {len(done)} cases."]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[], help="names of sample models; all without")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    targets = sorted((ROOT / "sample_models").glob("*.py"))
    chosen = [target for target in targets if not options.models or target.stem in options.models]
    cases: list[Case] = []
    for target in chosen:
        cases.extend(model_cases(target, options))
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(table(cases, options), encoding="utf-8")  # after each model: it may be stopped
    print(table(cases, options))


if __name__ == "__main__":
    main()
