"""Losses, gradients and statistics that are not finite, detected before a step is taken with them.

===========  ================================================================================================
policy       effect
===========  ================================================================================================
``stop``     the first rank that detects one reports it, and no weight is stepped with it
``warn``     the loss is checked and reported; training continues, as in a plain loop that checks nothing
``skip``     all ranks agree to skip the step; running statistics that became non-finite are restored
===========  ================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from autopipe.runtime.step.scalars import read_together


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether every element of the tensors is finite. One pass over each tensor, one synchronization."""
    return math.isfinite(float(largest(tensors)))


def largest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest absolute value, on the device of the tensors: finite if and only if all elements are."""
    dense = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    filled = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in dense if tensor.numel()]
    if not filled:
        return torch.zeros(())
    if any(tensor.is_cuda for tensor in filled):
        return torch.nn.utils.get_total_norm(filled, float("inf"))  # few kernels
    # on a CPU, the maximum norm of torch takes 20 times as long
    extremes = [extreme.double() for tensor in filled for extreme in torch.aminmax(tensor.detach())]
    return torch.stack(extremes).abs().amax()


def first_nonfinite(parameters: Mapping[str, nn.Parameter]) -> str:
    """Return the name of the first parameter whose gradient is not finite, "" where all are."""
    for name, parameter in parameters.items():
        if parameter.grad is not None and not all_finite([parameter.grad]):
            return name
    return ""


class FiniteBuffers:
    """Copies of the buffers that a stage's forwards write, as they were after the last finite step.

    ``written`` names these buffers.
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
        self.restore_nonfinite()

    def restore_nonfinite(self) -> None:
        """Restore the buffers that are not finite, and copy those that are."""
        current = [module._buffers[key] for module, key in self._places]
        checked = [b for b in current if b is not None and b.is_floating_point() and self._kept]
        finite = iter(read_together([largest([buffer]) for buffer in checked]).isfinite().tolist())
        kept = []
        for index, ((module, key), buffer) in enumerate(zip(self._places, current, strict=True)):
            assert buffer is not None
            if buffer.is_floating_point() and self._kept and not next(finite):
                # a new tensor: autograd may have saved this one for a microbatch in flight
                module._buffers[key] = self._kept[index].clone()
                kept.append(self._kept[index])
            else:
                kept.append(buffer.detach().clone())
        self._kept = kept
