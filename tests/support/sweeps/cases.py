"""Sweeps of a small model whose data is slow, so that leases end while jobs train."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from autopipe.commands.exporting import export
from autopipe.commands.settings import ExportSettings
from support.commands import MODEL

# a minibatch takes so long; the variable speeds up runs whose time does not matter
PAUSE = """
import os
import select

quick_data = data
def data(batch_size=8):
    for item in quick_data(batch_size):
        select.select([], [], [], float(os.environ.get("SWEEP_PAUSE", "0.02")))
        yield item
"""
OPTIONS = {"device": "cpu", "batch-size": 8, "microbatch-sizes": [2], "num-microbatches": 4}


def write_sweep(folder: Path, jobs: str, *, steps: int, lease: float = 0.5, bad: int = -1, more: str = "") -> None:
    """Write model.py and sweep.toml. ``jobs``: the text of the jobs; ``bad``: the minibatch on which models fail."""
    model = MODEL % {"steps": 1_000_000, "bad": bad, "nan": -1} + PAUSE
    (folder / "model.py").write_text(model)
    defaults = "\n".join(f"{name} = {value!r}" for name, value in OPTIONS.items())
    text = f"devices = 2\nlease = {lease}\n{more}\n[defaults]\n{defaults}\nsteps = {steps}\n{jobs}"
    (folder / "sweep.toml").write_text(text)


def alone(run: str, *options: str) -> list[str]:
    """Return the words of ``autopipe train`` that train a job of ``write_sweep`` alone."""
    words = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value).strip("[]"))]
    return ["train", "model.py", "--gpus", "1", *words, "--run-dir", run, *options]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Export the weights of a run, and return them."""
    output = run.with_name(f"{run.name}.pt")
    export(ExportSettings(output=output, run=run))
    tensors: dict[str, torch.Tensor] = torch.load(output, weights_only=True)
    return tensors


def assert_equal_weights(run: Path, other: Path) -> None:
    """Assert that two runs have the same weights, bit for bit."""
    mine, others = weights(run), weights(other)
    assert mine.keys() == others.keys()
    assert [name for name in mine if not torch.equal(mine[name], others[name])] == []


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return all processes of commands that were started in a folder, except this one."""
    alive = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mine = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if mine and Path(process.cwd()) == folder:
                alive.append(process)
    return alive


def ranks_in(folder: Path) -> Iterator[psutil.Process]:
    """Yield the ranks among them, which have their logs open."""
    for process in processes_in(folder):
        with contextlib.suppress(psutil.Error, OSError):
            if any("/logs/rank_" in file.path for file in process.open_files()):
                yield process
