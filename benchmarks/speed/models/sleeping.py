"""Layers that sleep, as on a device that computes while its host waits: one value of `width` numbers between them.

The first number of each sample is computed, so that losses and weights show whether two systems do the same work.
"""

import time

import numpy as np
import torch
from torch import nn

from benchmarks.speed.meter import metered


@torch.library.custom_op("autopipe_speed::layer", mutates_args=())
def layer(x: torch.Tensor, weight: torch.Tensor, width: int, forward: float, backward: float) -> torch.Tensor:
    time.sleep(forward)
    output = np.zeros((x.shape[0], width), np.float32)  # pages that are not written until they are read
    output[:, 0] = x[:, 0].numpy() * float(weight)
    return torch.from_numpy(output)


@layer.register_fake
def _(x, weight, width, forward, backward):
    return x.new_empty(x.shape[0], width)


@torch.library.custom_op("autopipe_speed::layer_backward", mutates_args=())
def layer_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, width: int, backward: float
) -> tuple[torch.Tensor, torch.Tensor]:
    time.sleep(backward)
    first = gradient[:, 0].numpy()
    output = np.zeros((gradient.shape[0], width), np.float32)
    output[:, 0] = first * float(weight)
    return torch.from_numpy(output), torch.tensor([float(first @ x[:, 0].numpy())])


@layer_backward.register_fake
def _(gradient, x, weight, width, backward):
    return gradient.new_empty(gradient.shape[0], width), weight.new_empty(1)


def _setup(ctx, inputs, output):
    x, weight, _, _, backward = inputs
    ctx.save_for_backward(x[:, :1], weight)
    ctx.width, ctx.seconds = x.shape[1], backward


def _backward(ctx, gradient):
    x, weight = ctx.saved_tensors
    received, own = torch.ops.autopipe_speed.layer_backward(gradient, x, weight, ctx.width, ctx.seconds)
    return received, own, None, None, None


layer.register_autograd(_backward, setup_context=_setup)


class Layer(nn.Module):
    def __init__(self, width, forward, backward):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.width, self.seconds = width, (forward, backward)

    def forward(self, x):
        return torch.ops.autopipe_speed.layer(x, self.weight, self.width, *self.seconds)


def build_model(layers=4, width=16, forward=0.008, backward=0.016, slow=1.0):
    """`slow`: how many times as long the layer in the middle takes."""
    factors = [slow if index == layers // 2 else 1.0 for index in range(layers)]
    widths = [width] * (layers - 1) + [1]
    return nn.Sequential(*(Layer(w, forward * f, backward * f) for w, f in zip(widths, factors, strict=True)))


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
