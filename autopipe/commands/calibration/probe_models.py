"""The models, data and loss of the runs that measure the runtime's overhead; the runs name this module as TARGET."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

SMALL, LARGE = 1 << 10, 1 << 16  # floats of a message
MULTIPLICATIONS = 16
STEPS = 40  # minibatches of data
_BLOCKS, _WIDTH, _ROWS, _CHANNELS, _IMAGE = 6, 128, 256, 16, 16


class TinyModel(nn.Module):
    """A chain of multiplications: messages of ``width`` floats between two stages, and little computation."""

    def __init__(self, width: int = SMALL) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(width) for _ in range(MULTIPLICATIONS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        for scale in self.scales:
            x = x * scale
        return x


class ReferenceModel(nn.Module):
    """Residual blocks, alternately linear and convolutional, which take 1 to 2 ms in each of two stages.

    At that size the overhead of a stage matters.
    """

    def __init__(self, carried: int = 0) -> None:
        super().__init__()
        self.carried = carried  # the number of first blocks whose outputs are added at the end, across every cut
        self.blocks = nn.ModuleList(_linear() if index % 2 else _convolutional() for index in range(_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the blocks, as many values as were passed in."""
        kept: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x = x.reshape(-1, _WIDTH) if index % 2 else x.reshape(-1, _CHANNELS, _IMAGE, _IMAGE)
            x = x + block(x)
            if index < self.carried:
                kept.append(x.reshape(-1, _ROWS * _WIDTH))
        x = x.reshape(-1, _ROWS * _WIDTH)
        for value in kept:
            x = x + value
        return x


def _linear() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _WIDTH))


def _convolutional() -> nn.Module:
    layers = (nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1), nn.BatchNorm2d(_CHANNELS), nn.ReLU())
    return nn.Sequential(*layers, nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1), nn.BatchNorm2d(_CHANNELS), nn.ReLU())


def small() -> TinyModel:
    """Return the tiny model with small messages."""
    return TinyModel(SMALL)


def large() -> TinyModel:
    """Return the tiny model with large messages."""
    return TinyModel(LARGE)


def reference() -> ReferenceModel:
    """Return the reference model."""
    return ReferenceModel()


def skipping() -> ReferenceModel:
    """Return the reference model with two values that skip most of its blocks."""
    return ReferenceModel(carried=2)


def small_data(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield minibatches for ``small``."""
    return _batches(batch_size, SMALL)


def large_data(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield minibatches for ``large``."""
    return _batches(batch_size, LARGE)


def reference_data(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield minibatches for ``reference``."""
    return _batches(batch_size, _ROWS * _WIDTH)


skipping_data = reference_data


def _batches(batch_size: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(STEPS):
        yield torch.ones(batch_size, width), torch.zeros(batch_size)


def distance(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of a batch."""
    return (output.mean(1) - target).square().mean()
