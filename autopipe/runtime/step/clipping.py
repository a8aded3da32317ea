"""The norm of all gradients over all stages, and the factor that clips it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn


def norms_of(owned: Iterable[Mapping[str, nn.Parameter]]) -> dict[str, torch.Tensor]:
    """Return the norm of every gradient, by name, on the device."""
    gradients = {name: p.grad for parameters in owned for name, p in parameters.items() if p.grad is not None}
    return {name: torch.linalg.vector_norm(gradient) for name, gradient in gradients.items()}


def global_norm(
    contributed: Sequence[str],
    values: torch.Tensor,
    trainable: Sequence[str],
    dtype: torch.dtype,
    agree: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the norm over all stages, a scalar on the host. Tied parameters count once.

    The arithmetic is that of torch.nn.utils.clip_grad_norm_, in the same order of parameters. ``contributed`` are the
    parameters whose norms, ``values``, this rank contributes. ``agree`` sums a vector over all ranks.
    """
    index = {name: position for position, name in enumerate(trainable)}
    # row 0: the norms; row 1: which parameters have a gradient, because torch leaves the others out of its sum
    norms = torch.zeros(2, len(index), dtype=torch.float64)
    places = [index[name] for name in contributed]
    norms[0, places] = values
    norms[1, places] = 1.0
    norms = agree(norms)
    total: torch.Tensor = torch.linalg.vector_norm(norms[0][norms[1] > 0].to(dtype))
    return total


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the factor of all gradients whose norm exceeds ``limit``; 1 otherwise."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)
