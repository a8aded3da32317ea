"""Complex layers: every value between two stages, and every gradient, has an imaginary part."""

import torch
from torch import nn

WIDTH = 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat)

    def forward(self, x):
        y = self.linear(x)
        return y * torch.sigmoid(y.abs())


def build_model():
    return nn.Sequential(*(Layer() for _ in range(4)))


def loss(output, target):
    return (output - target).abs().square().mean()


def data(batch_size=16):
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        x = torch.randn(batch_size, WIDTH, dtype=torch.cfloat, generator=generator)
        yield x, x.roll(1, 1) * 1j
