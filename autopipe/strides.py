"""The order of a tensor's elements in memory, as a few numbers, and copies with the same order.

Kernels add up in another order over other strides, so the last bits would differ from those of a plain loop. The order
of the dimensions matters, and which of them have gaps after their elements, as slices have. The width of the gaps does
not matter, and copies have narrow ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

GAP = 16  # elements, which preserves alignment


@dataclass(frozen=True, slots=True)
class Layout:
    """What a receiver must know of a tensor before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # as ``memory_order``; () for a contiguous tensor
    order: tuple[int, ...] = ()


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions from the outermost in memory to the innermost, then 1 for each that has gaps, else 0.

    A tensor whose elements share memory, such as an expanded one, is described without gaps.
    """
    count = tensor.dim()
    if tensor.is_contiguous():
        return [*range(count), *[0] * count]
    dense = torch.empty_like(tensor, device="meta").stride()  # the same order without gaps
    order = sorted(range(count), key=lambda d: dense[d], reverse=True)
    gaps, least = [0] * count, 1
    for place in reversed(range(count)):
        size, stride = tensor.shape[order[place]], tensor.stride(order[place])
        if size == 1:
            continue
        if stride < least:
            return [*order, *[0] * count]
        gaps[place] = int(stride > least)
        least = stride * size
    return [*order, *gaps]


def packed(tensor: torch.Tensor, layout: Sequence[int]) -> torch.Tensor:
    """Return the elements in an order in memory, without gaps. ``layout`` () is the contiguous order."""
    return tensor.permute(*layout[: tensor.dim()]).contiguous() if layout else tensor.contiguous()


def arranged(tensor: torch.Tensor, layout: Sequence[int]) -> torch.Tensor:
    """Return a copy of a tensor in an order in memory."""
    elements = packed(tensor, layout)
    copy = elements.clone() if elements.data_ptr() == tensor.data_ptr() else elements
    return unpacked(copy, tensor.shape, layout)


def unpacked(elements: torch.Tensor, shape: Sequence[int], layout: Sequence[int]) -> torch.Tensor:
    """Return the tensor of a shape from its elements. It shares their memory unless there are gaps."""
    if not layout:
        return elements if elements.shape == tuple(shape) else elements.view(tuple(shape))
    count = len(shape)
    order, gaps = list(layout[:count]), layout[count:]
    stored = elements.view([shape[d] for d in order])
    tensor = stored.permute([order.index(d) for d in range(count)])
    return _with_gaps(tensor, order, gaps) if any(gaps) else tensor


def _with_gaps(tensor: torch.Tensor, order: Sequence[int], gaps: Sequence[int]) -> torch.Tensor:
    strides, step = [1] * tensor.dim(), 1
    for dimension, gap in zip(reversed(order), reversed(gaps), strict=True):
        if gap:
            step = 2 if step == 1 else (step // GAP + 1) * GAP
        strides[dimension] = step
        step *= tensor.shape[dimension]
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same order in memory, equal to that of ``unpacked``."""
    layout = memory_order(tensor)
    order, gaps = layout[: tensor.dim()], layout[tensor.dim() :]
    return _with_gaps(tensor, order, gaps) if any(gaps) else tensor.clone()


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last of a strided tensor; 0 if it has none."""
    return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
