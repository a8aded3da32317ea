"""Who reads the data in wide data parallel: rank 0 for all ranks, or each rank all of it.

Trains a small network for images on replicas of one stage, with minibatches of images of 3x224x224: once from tensors
in memory, which cost nothing to read, and once cropped, flipped and normalised for each minibatch. The runs of the two
readers alternate. Reports medians of the seconds of a step, without the first ones of a run. Writes
benchmarks/results/readers.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent / "results" / "readers.md"
AUTOPIPE = str(Path(sys.executable).with_name("autopipe"))
READERS = ("each", "one")
SOURCES = {"in_memory": "tensors in memory", "prepared": "cropped, flipped, normalised"}
WARM_UP = 3
MODEL = """
import torch
from torch import nn

POOL = torch.randint(0, 256, (64, 3, 256, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(64) % 10
MEAN, DEVIATION = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def build_model():
    layers = [nn.Conv2d(3, 16, 7, 4, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1)]
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


loss = nn.CrossEntropyLoss()


def optimizer(parameters):
    return torch.optim.SGD([tensor for _, tensor in parameters], lr=0.01)


def normalised(images):
    return (images.float() / 255 - MEAN[:, None, None]) / DEVIATION[:, None, None]


def in_memory(batch_size=32):
    every = torch.arange(batch_size) % 64
    yield from [(normalised(POOL[every, :, :224, :224]), LABELS[every])] * 1000


def prepared(batch_size=32):
    g = torch.Generator().manual_seed(1)
    while True:
        which = torch.randint(0, 64, (batch_size,), generator=g)
        images = []
        for index in which.tolist():
            top, left, flip = torch.randint(0, 32, (3,), generator=g).tolist()
            image = POOL[index, :, top : top + 224, left : left + 224]
            images.append(normalised(image.flip(2) if flip < 16 else image))
        yield torch.stack(images), LABELS[which]
"""


def run(folder: Path, source: str, reader: str, number: int, options: argparse.Namespace) -> list[float]:
    """Train, and return the seconds of the steps after the warm-up. Raises: SystemExit if there is another plan."""
    work, path = folder / source, folder / f"{source}-{reader}-{number}"
    words = [AUTOPIPE, "train", "images.py", "--data", f"images.py:{source}", "--gpus", str(options.ranks)]
    words += ["--device", "cpu", "--batch-size", str(options.batch_size), "--num-microbatches", str(options.ranks)]
    words += ["--schedule", "gpipe", "--replicas", "auto", "--no-check", "--audit-every", "0"]
    words += ["--checkpoint-every", "0", "--steps", str(options.steps + WARM_UP), "--data-reader", reader]
    words += ["--work-dir", str(work), "--run-dir", str(path), "--json"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    if len(json.loads((path / "plan.json").read_text(encoding="utf-8"))["stages"]) != 1:
        raise SystemExit(f"the plan has several stages\n{done.stderr}")
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["step_seconds"] for row in rows if "step_seconds" in row][WARM_UP:]


def table(times: dict[tuple[str, str], list[float]], options: argparse.Namespace, load: float) -> str:
    """Return the result as Markdown. ``load``: the load average before."""
    megabytes = options.batch_size * 3 * 224 * 224 * 4 / 1e6
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, CPU"
    lines = [
        "# Who reads the data in wide data parallel",
        "",
        f"A small convolutional network on {options.ranks} replicas of one stage, with {options.ranks} microbatches. A",
        f"minibatch has {options.batch_size} images of 3x224x224 ({megabytes:.0f} MB). Medians of",
        f"{options.steps} steps of {options.rounds} runs, which alternate. {machine};",
        f"load average before: {load:.1f}.",
        "",
        "| data | each rank reads, s a step | rank 0 reads, s a step | ratio |",
        "|---|---|---|---|",
    ]
    for source, text in SOURCES.items():
        each, one = (statistics.median(times[source, reader]) for reader in READERS)
        lines.append(f"| {text} | {each:.3f} | {one:.3f} | {one / each:.2f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Run the measurements, print the results and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    times: dict[tuple[str, str], list[float]] = {(source, reader): [] for source in SOURCES for reader in READERS}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "images.py").write_text(MODEL, encoding="utf-8")
        for number in range(options.rounds):
            for source, reader in times:
                seconds = run(Path(folder), source, reader, number, options)
                times[source, reader] += seconds
                print(f"{source}, {reader}: {statistics.median(seconds):.3f} s", flush=True)
    text = table(times, options, load)
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
