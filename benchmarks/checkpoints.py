"""The cost of checkpoints: the write rate of a large one, and the step time with a checkpoint at every step.

Writing: one gigabyte, written by the code of a rank's writing thread (with hashing), alternates with a loop that writes
as many bytes and calls fsync. The copy that training waits for is timed separately: the first into new memory, later
ones over it. Training: two ranks of ``sample_models/gpt.py`` without checkpoints and with one at every step, in turns,
without the first step of each run. Reports medians. Writes benchmarks/results/checkpoints.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import autopipe
from autopipe.runtime.checkpoint.directory import unfinished
from autopipe.runtime.checkpoint.parts import Part, write_part
from autopipe.runtime.checkpoint.snapshot import Snapshot

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results" / "checkpoints.md"
CHUNK = 64 * 2**20


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def plain_write(path: Path, data: memoryview) -> None:
    """Write bytes to the disk with plain calls of the operating system."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written : written + CHUNK])
    os.fsync(descriptor)
    os.close(descriptor)


def writing(folder: Path, size: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the copy (first, later), of the checkpoint file, and of the plain write, by round."""
    tensors = {f"w{i}": torch.randn(size // 4 // 64) for i in range(64)}
    snapshot = Snapshot()
    seconds: dict[str, list[float]] = {"first copy": [seconds_of(lambda: snapshot.take(tensors))]}
    data = torch.cat(list(tensors.values())).numpy().view("uint8").data
    for index in range(rounds):
        seconds.setdefault("copy", []).append(seconds_of(lambda: snapshot.take(tensors)))
        for name in ("plain", "ours") if index % 2 else ("ours", "plain"):
            place = unfinished(folder, index, "plan")
            if name == "ours":
                took = seconds_of(lambda place=place: write_part(place, Part(0, snapshot), (1,)))
            else:
                took = seconds_of(lambda: plain_write(folder / "plain", data))
                (folder / "plain").unlink()
            seconds.setdefault(name, []).append(took)
        for path in place.iterdir():
            path.unlink()
    return seconds


def step_seconds(folder: Path, every: int, steps: int, batch_size: int) -> float:
    """Return the seconds per step of a training with a checkpoint after each ``every`` steps (0: none)."""
    times: list[float] = []
    model = ROOT / "sample_models" / "gpt.py"
    pipe = autopipe.Pipeline(model, work_dir=folder, device="cpu", gpus=2, replicas="never", schedule="1f1b")
    pipe.train(
        batch_size=batch_size,
        num_microbatches=8,
        steps=steps,
        checkpoint_every=every,
        on_event=lambda kind, fields: times.append(fields["seconds"]) if kind == "step" else None,
    )
    return (times[-1] - times[0]) / (len(times) - 1)


def main() -> None:
    """Run the measurements, print the results and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=None, help="where to write [default: the temporary folder]")
    options = parser.parse_args()
    size, rounds = int(options.gigabytes * 1e9) // 256 * 256, options.rounds
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        seconds = writing(Path(folder), size, rounds)
        ours, plain = statistics.median(seconds["ours"]), statistics.median(seconds["plain"])
        ratio = statistics.median(p / o for o, p in zip(seconds["ours"], seconds["plain"], strict=True))
        without, every = [], []
        for index in range(rounds):
            for steps_apart in (0, 1) if index % 2 else (1, 0):
                took = step_seconds(Path(folder), steps_apart, options.steps, options.batch_size)
                (every if steps_apart else without).append(took)
            print(f"round {index}: a step takes {without[-1]:.3f} s, {every[-1]:.3f} s with a checkpoint")
    slower = statistics.median(e / w for w, e in zip(without, every, strict=True)) - 1
    machine = f"{platform.processor() or platform.machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    lines = [
        "# Checkpoints",
        "",
        f"Medians of {rounds} alternating rounds; ratios are medians of the ratios of the rounds. "
        f"{machine} at the end.",
        "",
        f"| writing {size / 1e9:.2f} GB | seconds | GB/s |",
        "|---|---|---|",
        f"| plain write and fsync | {plain:.2f} | {size / plain / 1e9:.2f} |",
        f"| a stage's file, hashed, and fsync | {ours:.2f} | {size / ours / 1e9:.2f} |",
        "",
        f"The checkpoint is written at {ratio:.0%} of the plain rate. Training waits only for the copy:",
        f"{seconds['first copy'][0]:.2f} s the first time, {statistics.median(seconds['copy']):.2f} s later.",
        "",
        "| `gpt.py`, 2 ranks, 1f1b | seconds per step |",
        "|---|---|",
        f"| no checkpoint | {statistics.median(without):.3f} |",
        f"| one at every step | {statistics.median(every):.3f} |",
        "",
        f"Saving at every step makes a step {slower:+.1%} longer.",
        "",
    ]
    print("\n".join(lines))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
