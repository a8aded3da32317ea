"""Losses, gradients and statistics that are no finite numbers: found before a step is taken with them.

===========  ================================================================================================
policy       what happens
===========  ================================================================================================
``stop``     the rank that finds it first says what it is, and no weight is stepped with it
``warn``     the loss is looked at and reported; everything goes on, as in a plain loop that looks at nothing
``skip``     all ranks agree to leave the step out; running statistics that were spoilt are put back
===========  ================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every element is a finite number. One pass over each tensor, one answer."""
    dense = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    filled = [tensor for tensor in dense if tensor.numel()]
    return not filled or math.isfinite(float(torch.nn.utils.get_total_norm(filled, float("inf"))))


def first_nonfinite(parameters: Mapping[str, nn.Parameter]) -> str:
    """Return the name of the first parameter whose gradient is not finite, "" where all are."""
    for name, parameter in parameters.items():
        if parameter.grad is not None and not all_finite([parameter.grad]):
            return name
    return ""


class FiniteBuffers:
    """Keeps what a stage's forwards write into its buffers as it was after the last finite step.

    ``written``: names of these buffers.
    """

    def __init__(self, stage: nn.Module, written: Iterable[str]) -> None:
        wanted = set(written)
        self._places = [
            (module, key)
            for path, module in stage.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and (f"{path}.{key}" if path else key) in wanted
        ]
        self._kept: list[torch.Tensor] = []
        self.settle()

    def settle(self) -> None:
        """Put back what is not finite, keep what is."""
        found = []
        for index, (module, key) in enumerate(self._places):
            buffer = module._buffers[key]
            assert buffer is not None
            if buffer.is_floating_point() and self._kept and not all_finite([buffer]):
                # another tensor: autograd may have saved this one for a microbatch in flight
                buffer = module._buffers[key] = self._kept[index].clone()
            found.append(buffer.detach().clone())
        self._kept = found
