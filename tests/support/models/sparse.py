"""A model file with sparse buffers."""

from __future__ import annotations

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        mixing = torch.eye(8) + torch.rand(8, 8) * (torch.rand(8, 8) > 0.7)
        self.register_buffer("mixing", mixing.to_sparse_csr())
        self.register_buffer("shift", torch.diag(torch.arange(8.0)).to_sparse())
        self.register_buffer("heads", (torch.eye(4) > 0).to_sparse(), persistent=False)
        self.scale = torch.eye(8).mul(0.5).to_sparse()

    def forward(self, x):
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x))
        x = torch.sparse.mm(self.shift, (self.mixing @ x.t())).t()
        for layer in self.layers[3:]:
            x = torch.tanh(layer(x))
        return torch.sparse.mm(self.scale, x.t()).t()


def build_model():
    return Net()


def loss(output, target):
    return (output - target).pow(2).mean()


def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield torch.randn(batch_size, 8, generator=g), torch.randn(batch_size, 8, generator=g)


evaluate_data = data
"""
