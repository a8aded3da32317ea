"""Reduce-scatters and all-gathers of a transport, compared with sums in the order of the ranks, bit for bit."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch

from autopipe.runtime.transport.base import Transport

SHAPES = [(1,), (5,), (3, 7), (2, 0), (100_003,), ()]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def _numbers(rank: int, entry: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + entry)
    return (torch.randn(tuple(shape), dtype=torch.float64, generator=generator) * 10.0**rank).to(dtype)


def _sum(group: Sequence[int], entry: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return functools.reduce(operator.add, [_numbers(rank, entry, shape, dtype) for rank in group])


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def order_matters(world: int) -> bool:
    """Return whether the reversed order rounds another sum, so that a test of the order can fail."""
    group, shape = range(world), (100_003,)
    return all(not torch.equal(_sum(group, 0, shape, d), _sum(group[::-1], 0, shape, d)) for d in DTYPES)


def compared(transport: Transport, group: Sequence[int]) -> dict[str, bool]:
    """Return which exchanges of this rank over a group have the expected result, and leave their input as it was."""
    place, equal = list(group).index(transport.rank), {}
    for dtype in DTYPES:
        for shape in SHAPES:
            parts = torch.stack([_numbers(transport.rank, entry, shape, dtype) for entry in range(len(group))])
            part = _numbers(transport.rank, 0, shape, dtype)
            every = torch.stack([_numbers(rank, 0, shape, dtype) for rank in group])
            total = _sum(group, place, shape, dtype)
            unchanged = parts.clone(), part.clone()
            name = f"{dtype} {shape}"
            equal[f"{name} sum"] = _equal(transport.reduce_scatter(group, parts), total)
            equal[f"{name} gather"] = _equal(transport.all_gather(group, part), every)
            equal[f"{name} input"] = _equal(parts, unchanged[0]) and _equal(part, unchanged[1])
            if len(shape) == 2:  # not contiguous
                turned = parts.transpose(1, 2).contiguous().transpose(1, 2)
                equal[f"{name} sum, turned"] = _equal(transport.reduce_scatter(group, turned), total)
                equal[f"{name} gather, turned"] = _equal(transport.all_gather(group, turned[0].t()), every.mT)
    return equal
