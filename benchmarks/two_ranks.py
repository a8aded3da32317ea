"""The speedup of two ranks over one process, compared with the bound of the schedule.

The baseline is the plain loop on the unmodified model with one thread; the two ranks have one thread each. With m
microbatches, a flush leaves each of two ranks idle for one of m + 1 microbatches, so the bound is 2m / (m + 1). Rounds
alternate between the two. Reports medians. Writes benchmarks/results/two_ranks.md.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

import autopipe
from autopipe.verify.plain import PlainSettings, plain_training
from autopipe.workload import LoadOptions, load_workload

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results" / "two_ranks.md"


def plain_rate(target: str, batch_size: int, num_microbatches: int, steps: int) -> float:
    """Return the samples per second of the plain loop, without the first step."""
    workload = load_workload(LoadOptions(target))
    items = list(itertools.islice(workload.items(batch_size), steps))
    times: list[float] = []
    torch.set_num_threads(1)
    plain_training(
        workload,
        items,
        PlainSettings(num_microbatches, seed=0, draws=False),
        on_step=lambda step, loss: times.append(time.perf_counter()),
    )
    return batch_size * (steps - 1) / (times[-1] - times[0])


def piped_rate(target: str, batch_size: int, num_microbatches: int, steps: int, work_dir: Path) -> float:
    """Return the samples per second of two ranks, without the first step."""
    seconds: list[float] = []
    pipe = autopipe.Pipeline(target, work_dir=work_dir, device="cpu", gpus=2, replicas="never")
    pipe.train(
        batch_size=batch_size,
        num_microbatches=num_microbatches,
        schedule="1f1b",
        steps=steps,
        on_event=lambda kind, fields: seconds.append(fields["seconds"]) if kind == "step" else None,
    )
    return batch_size * (steps - 1) / (seconds[-1] - seconds[0])


def main() -> None:
    """Run the measurements, print the results and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=str(ROOT / "sample_models" / "gpt.py"))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size, m = options.batch_size, options.num_microbatches
    plain, piped = [], []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(options.rounds):
            plain.append(plain_rate(options.target, size, m, options.steps))
            piped.append(piped_rate(options.target, size, m, options.steps, Path(folder)))
            print(f"round {index}: one process {plain[-1]:.1f}, two ranks {piped[-1]:.1f} samples/s")
    bound = 2 * m / (m + 1)
    ratio = statistics.median(b / a for a, b in zip(plain, piped, strict=True))
    machine = f"{platform.processor() or platform.machine()}, torch {torch.__version__}, CPU"
    one, two = statistics.median(plain), statistics.median(piped)
    lines = [
        "# Two ranks against one process",
        "",
        f"`{Path(options.target).name}`, minibatch {size}, {m} microbatches, 1f1b, one thread per rank; medians of",
        f"{options.rounds} interleaved rounds of {options.steps} steps. {machine}.",
        "",
        "| one process, samples/s | two ranks, samples/s | ratio | bound 2m/(m+1) | of the bound |",
        "|---|---|---|---|---|",
        f"| {one:.1f} | {two:.1f} | {ratio:.2f} | {bound:.2f} | {ratio / bound:.2f} |",
        "",
    ]
    print("\n".join(lines))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
