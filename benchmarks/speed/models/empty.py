"""Layers that compute almost nothing: a step is the work of the runtime. The figures are those of `growth.py`, too."""

import torch
from torch import nn

from benchmarks.speed.meter import metered


class Layer(nn.Module):
    def __init__(self, parameters):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(parameters))

    def forward(self, x):
        return x * self.weight[:1]


class Model(nn.Module):
    def __init__(self, layers, width, parameters):
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(Layer(parameters) for _ in range(layers))

    def forward(self, x):
        if self.width > 1:
            x = x.expand(-1, self.width)
        for layer in self.layers:
            x = layer(x)
        return x


def build_model(layers=4, width=1, parameters=1):
    return Model(layers, width, parameters)


def loss(output, target):
    return (output - target).square().mean()


def _batches(batch_size):
    generator = torch.Generator().manual_seed(0)
    while True:
        x = torch.rand(batch_size, 1, generator=generator)
        yield x, 2 * x


def data(batch_size=16):
    return metered(_batches(batch_size))


def optimizer(named_parameters):
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=1e-3)
