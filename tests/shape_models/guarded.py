"""Decisions that depend on the data, with the same outcome for every batch."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        if h.sum() > -1e9:
            h = torch.tanh(self.b(h))
        if h.sum().item() < 1e9:
            h = h * 2
        return h


def loss(output, target):
    return (output - target).pow(2).mean()


def data(batch_size=6):
    generator = torch.Generator().manual_seed(8)
    for _ in range(3):
        x = torch.randn(batch_size, 4, generator=generator)
        yield x, x.flip(1)
