"""How a tensor lies in memory, in few numbers, and a copy that lies so.

Kernels add up in another order over other strides, and the last bits would not be those of a plain loop. What counts is
the order of the dimensions and which of them have gaps behind their elements, as slices have; how wide these are does
not, and a copy has narrow ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

GAP = 16  # elements: what is aligned stays so


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions from the outermost in memory to the innermost, then for each of these 1 where it has gaps.

    A tensor whose elements share memory, as an expanded one, is told without gaps.
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
    """Return the elements in their order in memory, without gaps."""
    return tensor.permute(*layout[: tensor.dim()]).contiguous() if tensor.dim() else tensor


def unpacked(elements: torch.Tensor, shape: Sequence[int], layout: Sequence[int]) -> torch.Tensor:
    """Return the tensor of a shape from its elements, whose memory it keeps unless there are gaps."""
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
    """Return a copy that lies in memory as the tensor does, and as ``unpacked`` would lay it."""
    layout = memory_order(tensor)
    order, gaps = layout[: tensor.dim()], layout[tensor.dim() :]
    return _with_gaps(tensor, order, gaps) if any(gaps) else tensor.clone()
