"""The memory layout of the tensors of a batch: described, and applied to tensors of other sizes.

A forward may read it (``is_contiguous()``, ``stride()``), so a batch that replaces another one gets the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def order_of(tensor: Tensor) -> str:
    """Return the order of a tensor's dimensions in memory, outermost first, and whether there are gaps or overlaps.

    Dimensions of size 1 are ignored, as by ``is_contiguous``.
    """
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    if tensor.is_contiguous():
        return "contiguous"
    sizes, strides = tensor.shape, tensor.stride()
    order = _outermost_first([d for d in range(tensor.dim()) if sizes[d] != 1], strides)
    extent, remarks = 1, []
    for dimension in reversed(order):
        if strides[dimension] == 0:
            remarks.append(f"{dimension} expanded")
            continue
        if strides[dimension] != extent:
            remarks.append(f"{dimension} with gaps" if strides[dimension] > extent else f"{dimension} overlapping")
        extent = strides[dimension] * sizes[dimension]
    return ", ".join([f"dimensions {' '.join(map(str, order))}", *remarks])


def strides_of(tensor: Tensor) -> str:
    """Return the strides of a tensor, in elements, as text."""
    return str(tuple(tensor.stride())) if tensor.layout == torch.strided else str(tensor.layout)


def strides_like(like: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return strides for a shape of the same rank that keep the order, gaps and overlaps of ``like``."""
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
        else:  # overlapping windows
            result[dimension] = stride
        extent, other = max(extent, stride * sizes[dimension]), max(other, result[dimension] * int(shape[dimension]), 1)
    return tuple(result)


def copied_item(item: Any) -> Any:
    """Return a copy of a batch whose tensors have the same layouts: a forward may change its batch."""
    return pytree.tree_map_only(Tensor, lambda leaf: laid_out(leaf, leaf), item)


def laid_out(value: Tensor, like: Tensor) -> Tensor:
    """Return a copy of ``value`` with the memory layout of ``like``; overlapping windows share their values."""
    if like.layout != torch.strided or value.layout != torch.strided or value.dim() != like.dim():
        return value.detach().clone()
    strides = strides_like(like, value.shape)
    copy = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return filled(copy, value)


def filled(tensor: Tensor, value: Tensor) -> Tensor:
    """Copy values into a tensor of any strides: the first of an expanded dimension, overlapping windows in order."""
    with torch.no_grad():
        target, source = tensor, value.detach()
        for dimension, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dimension] > 1:
                target, source = target.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
        try:
            target.copy_(source)
        except RuntimeError:  # overlapping windows: torch refuses to write them together
            for part, values in zip(target.unbind(0), source.unbind(0), strict=True):
                filled(part, values)
    return tensor


def _outermost_first(dimensions: list[int], strides: Sequence[int]) -> list[int]:
    """Return dimensions by decreasing stride, expanded ones first; equal strides keep their order."""
    return sorted(dimensions, key=lambda d: (strides[d] != 0, -strides[d], d))
