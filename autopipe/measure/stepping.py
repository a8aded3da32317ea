"""The cost of an optimizer step per byte of parameters: seconds, and bytes of state."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopipe.measure.clock import Clock
from autopipe.measure.piece import StateCopies, tensors_of

_MOST_BYTES = 64 << 20  # of parameters: with gradients and state, more than the caches of a CPU or a GPU
_REPEATS = 3


class HasOptimizer(Protocol):
    """The part of a workload that makes the optimizer."""

    def optimizer(self, named_parameters: list[tuple[str, nn.Parameter]], /) -> Optimizer | None:
        """Return the optimizer of some of the parameters."""


def optimizer_cost(
    root: nn.Module,
    parameters: Mapping[str, bool],
    workload: HasOptimizer,
    clock: Clock,
    *,
    most_bytes: int = _MOST_BYTES,
) -> tuple[float, float]:
    """Return (seconds per byte, bytes of state per byte) of one step, on copies with random gradients.

    ``parameters``: path -> whether the parameter is trained. Those after the first ``most_bytes`` are left out, and so
    are larger ones, such as embeddings, if there are others.
    """
    state, named, size = StateCopies(root, clock.device), [], 0
    # without those that no call reads
    sizes = {path: p.numel() * p.element_size() for path, p in root.named_parameters(remove_duplicate=False)}
    paths = [path for path, trained in parameters.items() if trained and path in sizes]
    for path in [path for path in paths if sizes[path] <= most_bytes] or paths:
        copied = state.attribute(path) if size < most_bytes else None
        if isinstance(copied, nn.Parameter):
            named.append((path, copied))
            size += copied.numel() * copied.element_size()
    optimizer = workload.optimizer(named) if size else None
    if optimizer is None:
        return 0.0, 0.0
    seconds = []
    gradients = [torch.randn_like(parameter) for _, parameter in named]
    for _ in range(_REPEATS + 1):
        for (_, parameter), gradient in zip(named, gradients, strict=True):
            parameter.grad = gradient.clone()
        seconds.append(clock.time(optimizer.step)[1])
    state_bytes = sum(_state_bytes(entry) for entry in optimizer.state.values())
    return statistics.median(seconds[1:]) / size, state_bytes / size


def _state_bytes(entry: object) -> int:
    tensors: list[Tensor] = tensors_of(entry)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
