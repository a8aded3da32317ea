"""A model and its runs, for the tests of weights and their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autopipe.runtime.transport.threads import run_in_threads
from support.pipelines import Pipeline, build, captured_file, plan_for

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, blocks=6):
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.register_buffer("shift", torch.arange(6.0) / 10)
        self.register_buffer("mask", torch.arange(6) != 2, persistent=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(blocks))
        self.memory = nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids) + self.shift
        x = self.memory(x)[0].mean(1) * self.mask
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)

def build_model():
    return Net()

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def data(batch_size=8):
    g = torch.Generator().manual_seed(1)
    for _ in range(4):
        yield torch.randint(0, 9, (batch_size, 4), generator=g), torch.randint(0, 9, (batch_size,), generator=g)
"""


def pipeline(folder: Path, stages: int = 3, **job: Any) -> Pipeline:
    path = folder / "net.py"
    path.write_text(MODEL)
    subject = captured_file(path)
    return build(subject, plan_for(subject, stages, "1f1b", 2, 8), folder / "run", **job)


def begun(built: Pipeline, init_from: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the ranks before their first step."""
    job = replace(built.job, init_from=str(init_from), save=False)
    return built.weights(run_in_threads(built.run, job, built.context, lambda session: None))
