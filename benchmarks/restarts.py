"""The time from kill -9 of a rank to the first step of the next attempt.

Trains ``sample_models/gpt.py`` with ``--max-restarts 1``. The rank is killed as soon as there is a second checkpoint.
The time of a step is that of its line in metrics.jsonl. The result includes one ordinary step, whose duration is
reported too. Reports medians. Writes benchmarks/results/restarts.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results" / "restarts.md"
AUTOPIPE = str(Path(sys.executable).with_name("autopipe"))
MOST_SECONDS = 300.0


def lines(path: Path) -> list[dict[str, float]]:
    """Return the complete lines of the metrics."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def resumed(path: Path) -> bool:
    """Return whether the second attempt has completed a step."""
    metrics = lines(path)
    restart = next((index for index, line in enumerate(metrics) if "restart" in line), len(metrics))
    return any("loss" in line for line in metrics[restart:])


def rank_of(pid: int, run: Path) -> psutil.Process | None:
    """Return the process of rank 1, identified by its log file."""
    for process in psutil.Process(pid).children(recursive=True):
        if any(file.path == str(run / "logs" / "rank_1.log") for file in process.open_files()):
            return process
    return None


def once(folder: Path, number: int, options: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds from the kill to the next step, and the seconds of an ordinary step."""
    run = folder / f"run-{number}"
    words = [AUTOPIPE, "train", str(ROOT / "sample_models" / "gpt.py"), "--gpus", "2", "--device", "cpu"]
    words += ["--replicas", "never"]
    words += ["--batch-size", str(options.batch_size), "--num-microbatches", "8", "--schedule", "1f1b", "--no-check"]
    words += ["--steps", "1000", "--checkpoint-every", "2", "--max-restarts", "1"]
    words += ["--work-dir", str(folder / "work"), "--run-dir", str(run)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        end = time.monotonic() + MOST_SECONDS
        metrics = run / "metrics.jsonl"
        while len(lines(metrics)) < options.steps or not (run / "checkpoints" / "latest").exists():
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the training ended with {process.poll()} before a rank could be killed")
            time.sleep(0.01)
        moments = [line["seconds"] for line in lines(metrics)]
        rank = rank_of(process.pid, run)
        if rank is None:
            raise SystemExit("no process has the log of rank 1 open")
        begin = time.perf_counter()
        rank.kill()
        while not resumed(metrics):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the training ended with {process.poll()} and did not resume")
            time.sleep(0.005)
        seconds = time.perf_counter() - begin
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return seconds, statistics.median(b - a for a, b in itertools.pairwise(moments))


def table(times: list[tuple[float, float]], options: argparse.Namespace) -> str:
    """Return the result as Markdown."""
    restart, step = (statistics.median(column) for column in zip(*times, strict=True))
    each = ", ".join(f"{seconds:.2f}" for seconds, _ in times)
    return "\n".join(
        [
            "# From kill -9 to the next step",
            "",
            f"`gpt.py`, 2 ranks, 1f1b, minibatch {options.batch_size}, {len(times)} times. "
            f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, CPU.",
            "",
            f"Median {restart:.2f} s ({each}), of which an ordinary step takes {step:.2f} s.",
            "",
        ]
    )


def main() -> None:
    """Run the measurements, print the results and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="before the kill")
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times = []
        for number in range(options.rounds):
            times.append(once(Path(folder), number, options))
            print(f"kill to first step {times[-1][0]:.2f} s, a step {times[-1][1]:.3f} s", flush=True)
    text = table(times, options)
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
