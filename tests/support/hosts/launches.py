"""What the tests of launchers share: a model, its plan for two ranks, and the same run made on this machine alone."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
from safetensors.numpy import load_file

AUTOPIPE = (sys.executable, "-m", "autopipe.cli")
STEPS = "60"
MODEL = """
import torch
from torch import nn

def build_model():
    layers = [layer for _ in range(6) for layer in (nn.Linear(24, 24), nn.Tanh())]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(24, 1))

def loss(output, target):
    return (output - target).pow(2).mean()

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for step in range(100_000):
        yield torch.randn(batch_size, 24, generator=g), torch.randn(batch_size, 1, generator=g)
"""
# a step takes a tenth of a second: there is time to do something between the first and the last
SLOW = """
import select
import model

def data(batch_size=8):
    for item in model.data(batch_size):
        select.select([], [], [], 0.1)
        yield item
"""
OPTIONS = ["--gpus", "2", "--device", "cpu", "--batch-size", "8", "--num-microbatches", "4", "--schedule", "1f1b"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def prepared(path: Path) -> Path:
    """Make a folder in which the model is planned and checked, and trained for STEPS steps in ``local``."""
    (path / "model.py").write_text(MODEL)
    done = subprocess.run(
        [*AUTOPIPE, "train", "model.py", *OPTIONS, "--microbatch-sizes", "2", "--steps", STEPS, "--run-dir", "local"],
        cwd=path,
        capture_output=True,
        text=True,
        timeout=200,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return path


def weights(run: Path) -> dict[str, bytes]:
    """Return what was saved at the end, byte by byte and whatever the stages: weights and the optimizer's state."""
    files = sorted((run / "checkpoints" / f"step-{int(STEPS):08d}").glob("*.safetensors"))
    assert files, sorted(run.rglob("*"))
    return {name: tensor.tobytes() for file in files for name, tensor in load_file(file).items()}


def await_(holds: Callable[[], object], seconds: float, why: Callable[[], object] = str) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, why()
        select.select([], [], [], 0.05)


def steps_made(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.is_file() else 0


def ranks(run: Path) -> dict[int, psutil.Process]:
    """Return the processes of a run's ranks, known by their logs."""
    by_rank = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            for log in (run / "logs").glob("rank_*.log"):
                if any(file.path == str(log) for file in process.open_files()):
                    by_rank[int(log.stem.removeprefix("rank_"))] = process
    return by_rank


def gone(processes: Iterable[psutil.Process], seconds: float) -> bool:
    _, alive = psutil.wait_procs(list(processes), timeout=seconds)
    return not alive


def one_line(text: str) -> str:
    return " ".join(text.split())
