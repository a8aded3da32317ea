"""A DataLoader with worker processes inside a rank: it feeds all ranks, and its processes end with the rank."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest
from support.commands import await_first_step
from support.warm.programs import AUTOPIPE

MODEL = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return {rows}

    def __getitem__(self, index):
        return torch.full((8,), index / {rows}), torch.tensor(float(index % 2))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.mean(-1)

def loss(output, target):
    return (output - target).pow(2).mean()

data = DataLoader(Rows(), batch_size=8, num_workers=2)
"""
COMMAND = [AUTOPIPE, "train", "net.py", "--gpus", "2", "--device", "cpu"]
OPTIONS = ["--microbatch-sizes", "2", "--num-microbatches", "4", "--no-check", "--run-dir", "run", "--json"]


def start(folder: Path, rows: int, steps: int) -> subprocess.Popen[str]:
    (folder / "net.py").write_text(MODEL.format(rows=rows))
    return subprocess.Popen(
        [*COMMAND, *OPTIONS, "--steps", str(steps)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(200)
def test_ranks_read_through_a_loader_with_workers(tmp_path: Path) -> None:
    process = start(tmp_path, rows=32, steps=6)  # more than an epoch
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert '"steps": 6' in out


@pytest.mark.timeout(200)
def test_workers_of_a_loader_end_with_a_killed_rank(tmp_path: Path) -> None:
    process = start(tmp_path, rows=8_000_000, steps=1_000_000)
    try:
        await_first_step(process)
        family = psutil.Process(process.pid).children(recursive=True)
        ranks = [one for one in family if len(one.children()) >= 2 and one.parent().pid != process.pid]
        assert len(ranks) == 1, [(one.pid, one.cmdline()) for one in family]  # rank 0 reads for all
        ranks[0].kill()
        process.communicate(timeout=60)
        assert process.returncode == 3
        assert psutil.wait_procs(family, timeout=10)[1] == []
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
