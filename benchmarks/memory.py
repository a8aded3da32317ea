"""Planned and measured peak memory of each stage, for every schedule: two CPU ranks, ``train --measure-memory``.

Compares the plan's sum of weights with their versions, gradients, optimizer state, saved activations and workspace with
the peak of live bytes during the instructions of the stage. No result is a time, so other load on the machine does not
matter. Writes benchmarks/results/memory.md.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import autopipe
from autopipe.report.results import StagePeak

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results" / "memory.md"
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble", "pipedream", "2bw")
STEPS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One model under one schedule."""

    model: str
    schedule: str
    peaks: tuple[StagePeak, ...] = ()
    refusal: str = ""  # the error, if planning failed


def measured(target: Path, schedule: str, folder: Path, options: argparse.Namespace) -> Case:
    """Train three steps, with the profile in the folder if it has one."""
    size = -(-options.batch_size // options.num_microbatches)
    pipe = autopipe.Pipeline(
        target,
        work_dir=folder,
        device="cpu",
        microbatch_sizes=(1, size),
        no_verify=True,
        gpus=2,
        replicas="never",
        batch_size=options.batch_size,
        schedule=schedule,
        num_microbatches=options.num_microbatches,
    )
    try:
        peaks = pipe.train(steps=STEPS, check=False, measure_memory=True).peaks
    except autopipe.AutopipeError as refused:
        return Case(target.stem, schedule, refusal=refused.what)
    return Case(target.stem, schedule, tuple(sorted(peaks, key=lambda peak: peak.stage)))


def error(peak: StagePeak) -> float:
    """Return the relative error of the plan."""
    return peak.planned_bytes / peak.bytes - 1


def table(cases: list[Case], options: argparse.Namespace) -> str:
    """Return the result as Markdown."""
    lines = [
        "# Planned against measured peak bytes",
        "",
        f"Two ranks, minibatch {options.batch_size}, {options.num_microbatches} microbatches, {STEPS} steps. "
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, CPU.",
        "",
        "| model | schedule | stage | in flight | versions | planned MiB | measured MiB | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        if case.refusal:
            lines.append(f"| {case.model} | {case.schedule} | | | | | not run: {case.refusal} | |")
        for peak in case.peaks:
            sizes = " | ".join(f"{size / 2**20:.2f}" for size in (peak.planned_bytes, peak.bytes))
            lines.append(
                f"| {case.model} | {case.schedule} | {peak.stage} | {peak.in_flight} | {peak.versions} | {sizes} "
                f"| {error(peak):+.1%} |"
            )
    errors = [abs(error(peak)) for case in cases for peak in case.peaks]
    if errors:
        within = sum(one <= options.bound for one in errors)
        lines += [
            "",
            f"{within} of {len(errors)} stages within {options.bound:.0%}; median {statistics.median(errors):.1%}, "
            f"worst {max(errors):.1%}.",
        ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Run the measurements, print the results and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["gpt", "resnet", "unet"], help="names of sample models")
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--bound", type=float, default=0.1)
    options = parser.parse_args()
    cases: list[Case] = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            for schedule in options.schedules:
                cases.append(measured(ROOT / "sample_models" / f"{model}.py", schedule, Path(folder), options))
                print(*table(cases[-1:], options).splitlines()[6:], sep="\n", flush=True)
    RESULTS.write_text(table(cases, options), encoding="utf-8")


if __name__ == "__main__":
    main()
