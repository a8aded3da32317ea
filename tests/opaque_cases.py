"""Model files with modules that cannot be one graph: what they call differs from batch to batch."""

from __future__ import annotations

from pathlib import Path

_HEAD = """
import random
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
"""

_TAIL = """
def build_model():
    return Model()

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for _ in range(6):
        yield torch.randn(batch_size, 6, 8, generator=g), torch.randn(batch_size, 6, 8, generator=g)

loss = nn.MSELoss

def optimizer(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters], lr=1e-2, weight_decay=0.1)
"""

EXPERTS = """
class Experts(nn.Module):
    def __init__(self, count=6):
        super().__init__()
        self.gate, self.drop = nn.Linear(8, count), nn.Dropout(0.2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(count))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weight, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number in torch.unique(chosen[: len(chosen) // 2]).tolist():
            rows, place = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, rows, self.drop(self.experts[number](flat[rows])) * weight[rows, place, None])
        return out.view_as(x)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.moe, self.drop = nn.LayerNorm(8), Experts(), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.moe(self.norm(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)
"""

LAYER_DROP = """
class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            if self.training and random.random() < 0.4:
                continue
            x = x + layer(x) * np.random.uniform(0.9, 1.1)
        return x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.stack, self.more = nn.Linear(8, 8), Stack(), nn.Linear(8, 8)
        self.other, self.drop, self.last = Stack(), nn.Dropout(0.1), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.drop(self.other(self.more(self.stack(self.first(x))))))
"""

STATISTICS = """
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        branch = int(x.mean() + self.mean.sum() > 0)
        self.seen[branch] += 1
        return x - self.mean, (self.b if branch else self.a)(x).tanh()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.one, self.two, self.last = nn.Linear(8, 8), Branches(), Branches(), nn.Linear(8, 8)

    def forward(self, x):
        x, y = self.one(self.first(x))
        z, y = self.two(x + y.sin())
        return self.last(y) + z
"""

CASES = {"experts": EXPERTS, "layer_drop": LAYER_DROP, "statistics": STATISTICS}


def write(name: str, folder: Path, text: str = "") -> Path:
    """Write a model file."""
    path = folder / f"{name}.py"
    path.write_text(_HEAD + (text or CASES[name]) + _TAIL, encoding="utf-8")
    return path
