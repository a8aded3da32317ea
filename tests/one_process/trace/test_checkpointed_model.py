"""A model that calls ``checkpoint()`` around dropout trains in stages as in a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pipelines import build, captured_file, minibatches, plan_for

from autopipe.verify.check import compare

MODEL = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
    def forward(self, x):
        return x + self.drop(torch.tanh(self.linear(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 1)
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)

def build_model():
    return Net()

def loss(output, target):
    return (output - target).pow(2).mean()

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield torch.randn(batch_size, 8, generator=g), torch.randn(batch_size, 1, generator=g)
"""


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_dropout_and_gradients_are_equal_for_every_number_of_stages(num_stages: int, tmp_path: Path) -> None:
    path = tmp_path / "checkpointed.py"
    path.write_text(MODEL)
    subject = captured_file(path)
    pipeline = build(subject, plan_for(subject, num_stages, "1f1b", 3, 8), tmp_path / "run", steps=3)
    items = minibatches(subject.workload, 3, 8)
    assert compare(subject.workload, pipeline.run, pipeline.job, pipeline.context, items, draws=True).bitwise
