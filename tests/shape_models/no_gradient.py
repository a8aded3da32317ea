"""An autograd function that reads two values and differentiates one."""

import torch
from torch import nn


class Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, reference):
        return value - reference

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        k = self.b(h)
        return Reference.apply(k, h)


def loss(output, target):
    return (output - target).pow(2).mean()


def data(batch_size=6):
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        x = torch.randn(batch_size, 4, generator=generator)
        yield x, x.flip(1)
