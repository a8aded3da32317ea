"""The model of the GPU trial: tied embeddings, a convolution with GroupNorm, a skip connection. It draws no numbers.

Without random numbers the weights after training can be compared with those of the plain loop on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import nn

WORDS, WIDTH, LENGTH = 96, 64, 32

if torch.cuda.is_available():
    # a plain loop on a CPU does not round to TF32
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    if os.environ.get("GPU_TRIAL_SYNC"):
        torch.cuda.set_sync_debug_mode("warn")


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of ``x``: (batch, length, width)."""
        x = x + self.conv(self.norm(x.transpose(1, 2))).transpose(1, 2)
        return x + self.outer(torch.nn.functional.gelu(self.inner(x)))


class Net(nn.Module):
    """Predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return scores (batch, length, words)."""
        x = first = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))


def build_model() -> Net:
    """Return the model."""
    return Net()


def data(batch_size: int = 16) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of words and the words that follow."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        words = torch.randint(WORDS, (batch_size, LENGTH + 1), generator=generator)
        yield words[:, :-1], words[:, 1:]


def loss(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return SGD: an adaptive optimizer would enlarge the rounding differences of two devices."""
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.02, momentum=0.9)
