"""How a tensor of a batch lies in memory: described, and given to another tensor of other sizes.

A forward may ask (``is_contiguous()``, ``stride()``), so a batch that stands for another one lies as that one does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def order_of(tensor: Tensor) -> str:
    """Return the order of a tensor's dimensions in memory, outermost first, and whether there are gaps or overlaps.

    Dimensions of size 1 say nothing, as for ``is_contiguous``.
    """
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    if tensor.is_contiguous():
        return "contiguous"
    sizes, strides = tensor.shape, tensor.stride()
    order = _outermost_first([d for d in range(tensor.dim()) if sizes[d] != 1], strides)
    extent, said = 1, []
    for dimension in reversed(order):
        if strides[dimension] == 0:
            said.append(f"{dimension} expanded")
            continue
        if strides[dimension] != extent:
            said.append(f"{dimension} with gaps" if strides[dimension] > extent else f"{dimension} overlapping")
        extent = strides[dimension] * sizes[dimension]
    return ", ".join([f"dimensions {' '.join(map(str, order))}", *said])


def strides_of(tensor: Tensor) -> str:
    """Return the strides of a tensor, in elements, as text."""
    return str(tuple(tensor.stride())) if tensor.layout == torch.strided else str(tensor.layout)


def strides_like(like: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return strides for another shape, of as many dimensions, that keep ``like``'s order, gaps and overlaps."""
    sizes, strides = like.shape, like.stride()
    result = [0] * len(shape)
    extent = other = 1
    for dimension in reversed(_outermost_first(list(range(like.dim())), strides)):
        stride = strides[dimension]
        if stride == 0 and sizes[dimension] != 1:
            continue
        if sizes[dimension] == 1 or stride >= extent:
            gap = 0 if sizes[dimension] == 1 else stride - extent
            result[dimension] = other + gap
        else:  # windows that overlap
            result[dimension] = stride
        extent, other = max(extent, stride * sizes[dimension]), max(other, result[dimension] * int(shape[dimension]), 1)
    return tuple(result)


def laid_out(value: Tensor, like: Tensor) -> Tensor:
    """Return a copy of ``value`` that lies in memory as ``like`` does; values of windows that overlap are shared."""
    if like.layout != torch.strided or value.layout != torch.strided or value.dim() != like.dim():
        return value.detach().clone()
    strides = strides_like(like, value.shape)
    copy = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return filled(copy, value)


def filled(found: Tensor, value: Tensor) -> Tensor:
    """Copy values into a tensor of any strides: of an expanded dimension the first, of windows one after the other."""
    with torch.no_grad():
        target, source = found, value.detach()
        for dimension, stride in enumerate(found.stride()):
            if stride == 0 and found.shape[dimension] > 1:
                target, source = target.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
        try:
            target.copy_(source)
        except RuntimeError:  # windows that overlap: torch refuses to write them at once
            for part, values in zip(target.unbind(0), source.unbind(0), strict=True):
                filled(part, values)
    return found


def _outermost_first(dimensions: list[int], strides: Sequence[int]) -> list[int]:
    """Return dimensions by falling stride; equal strides in the order of the dimensions, expanded ones first."""
    return sorted(dimensions, key=lambda d: (strides[d] != 0, -strides[d], d))
