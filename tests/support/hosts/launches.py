"""Shared by the tests of launchers: a model, its plan for two ranks, and a local run to compare with."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
from safetensors.numpy import load_file

from support.waiting import under_load

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
# a step takes a tenth of a second, which leaves time to act between the first and the last
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
    """Plan, check and train the model in a folder, for STEPS steps in the run ``local``."""
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
    """Return the bytes of the final weights and optimizer state, of all stages together."""
    files = sorted((run / "checkpoints" / f"step-{int(STEPS):08d}").glob("*.safetensors"))
    assert files, sorted(run.rglob("*"))
    return {name: tensor.tobytes() for file in files for name, tensor in load_file(file).items()}


def steps_made(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.is_file() else 0


def ranks(run: Path) -> dict[int, psutil.Process]:
    """Return the ranks of a run, identified by their logs; a process of a rank, which has its log, comes after it."""
    by_rank = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            for log in (run / "logs").glob("rank_*.log"):
                if any(file.path == str(log) for file in process.open_files()):
                    by_rank.setdefault(int(log.stem.removeprefix("rank_")), process)
    return by_rank


def gone(processes: Iterable[psutil.Process], seconds: float) -> bool:
    _, alive = psutil.wait_procs(list(processes), timeout=under_load(seconds))
    return not alive


def one_line(text: str) -> str:
    return " ".join(text.split())
