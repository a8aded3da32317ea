"""Calls of generated stage files with sequence parallelism: members have different positions of the same values.

Between the products that a team shards, all members have the same values, and each computes all of them
(``autopipe.team``). With sequence parallelism each member computes its own positions there: it has ``1/t`` of their
memory. A sum over the members becomes a reduce-scatter, which leaves each member the sums of its positions, and a value
enters the calls of an axis through an all-gather. ``rows`` says where a value has its positions.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (arXiv:2205.05198), section
4.2.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopipe.errors import RunError
from autopipe.strides import arranged, memory_order, unpacked
from autopipe.team import Member, Team, own_rows_of_table

Rows = int | tuple[int, int]
"""The dimension of the positions; or a dimension that is ``outer * positions``, and the number of all positions."""


def _parts(whole: Tensor, rows: Rows, size: int) -> Tensor:
    """Return the positions of each member, [size, ..., outer, positions, ...].

    Raises: RunError if the members cannot have equally many.
    """
    dimension, length = rows if isinstance(rows, tuple) else (rows, whole.shape[rows])
    if length % size:
        raise RunError(
            f"a length of {length} cannot be divided by the {size} members of a team",
            remedy=f"pad the batches to a multiple of {size}, or train without --sequence-parallel",
        )
    return torch.unflatten(whole, dimension, (-1, size, length // size)).movedim(dimension + 1, 0)


def _own(whole: Tensor, rows: Rows, team: Team) -> Tensor:
    """Return a copy of a member's positions of a value, in the same order in memory."""
    dimension = _dimension(rows)
    part = _parts(whole, rows, team.size)[team.member].flatten(dimension, dimension + 1)
    return arranged(part, memory_order(whole))


def _dimension(rows: Rows) -> int:
    return rows[0] if isinstance(rows, tuple) else rows


def _gather(part: Tensor, rows: Rows, team: Team) -> Tensor:
    """Return the positions of all members, in the same order in memory: calls round as without positions."""
    dimension = _dimension(rows)
    own = rows[1] // team.size if isinstance(rows, tuple) else part.shape[dimension]
    each = team.gather(torch.unflatten(part.contiguous(), dimension, (-1, own)))
    whole = each.movedim(0, dimension + 1).flatten(dimension, dimension + 2)
    return whole.contiguous() if part.is_contiguous() else arranged(whole, memory_order(part))


def _reduce(whole: Tensor, rows: Rows, team: Team) -> Tensor:
    """Return the sum over the members of their values at this member's positions."""
    dimension = _dimension(rows)
    total = team.add_parts(_parts(whole, rows, team.size).contiguous())
    return total.flatten(dimension, dimension + 1)


class _Gathered(torch.autograd.Function):
    """Forward: the positions of all members. Backward: this member's positions, or their sum over the members."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, team: Team, rows: Rows, adds: bool) -> Tensor:
        ctx.team, ctx.rows, ctx.adds = team, rows, adds
        return _gather(value, rows, team)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        own = _reduce if ctx.adds else _own
        return own(gradient, ctx.rows, ctx.team), None, None, None


class _Scattered(torch.autograd.Function):
    """Forward: this member's positions, or their sum over the members. Backward: the positions of all members."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, team: Team, rows: Rows, adds: bool) -> Tensor:
        ctx.team, ctx.rows = team, rows
        own = _reduce if adds else _own
        return own(value, rows, team)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather(gradient, ctx.rows, ctx.team), None, None, None


def _apply(function: Any, stage: Member, value: Tensor, rows: Rows, *, adds: bool) -> Tensor:
    result: Tensor = function.apply(value, stage._autopipe_team, rows, adds)
    return result


def gathered(stage: Member, value: Tensor, rows: Rows) -> Tensor:
    """Return a value with the positions of all members, for a call that is not divided."""
    return _apply(_Gathered, stage, value, rows, adds=False)


def entered_rows(stage: Member, value: Tensor, rows: Rows) -> Tensor:
    """Return a value with the positions of all members, for the calls of an axis: their gradients are summed."""
    return _apply(_Gathered, stage, value, rows, adds=True)


def own_rows(stage: Member, value: Tensor, rows: Rows) -> Tensor:
    """Return this member's positions of a value that all members have."""
    return _apply(_Scattered, stage, value, rows, adds=False)


def summed_rows(stage: Member, part: Tensor, rows: Rows) -> Tensor:
    """Return the sum of the members' parts at this member's positions."""
    return _apply(_Scattered, stage, part, rows, adds=True)


def summed_rows_linear(stage: Member, value: Tensor, weight: Tensor, bias: Tensor, rows: Rows) -> Tensor:
    """Return this member's positions of ``linear(value, weight, bias)``, whose inputs are cut."""
    total = summed_rows(stage, functional.linear(value, weight), rows)
    return total + bias.to(total.dtype)


def summed_rows_addmm(stage: Member, bias: Tensor, value: Tensor, weight: Tensor, rows: Rows) -> Tensor:
    """Return this member's positions of ``addmm(bias, value, weight)``, whose inner dimension is cut."""
    total = summed_rows(stage, value @ weight, rows)
    return total + bias.to(total.dtype)


def summed_rows_heads(
    stage: Member, part: Tensor, out_bias: Tensor | None, rows: Rows, batch_first: bool = False
) -> tuple[Tensor, None]:
    """Return this member's positions of the result of an ``nn.MultiheadAttention``. ``rows``: of that result."""
    if batch_first:  # ``part`` is [length, batch, width]
        rows = {0: 1, 1: 0}[rows] if isinstance(rows, int) else rows
    total = summed_rows(stage, part, rows)
    total = total if out_bias is None else total + out_bias
    return total.transpose(0, 1) if batch_first else total, None


def looked_up_rows(
    stage: Member,
    ids: Tensor,
    weight: Tensor,
    rows: Rows,
    padding_idx: int | None = None,
    *,
    size: int | None = None,
) -> Tensor:
    """Return this member's positions of ``embedding(ids, weight)``, whose table is cut. ``size``: as ``looked_up``."""
    return summed_rows(stage, own_rows_of_table(stage, ids, weight, padding_idx, size=size), rows)


def dropped_rows(stage: Member, value: Tensor, rate: float, rows: Rows) -> Tensor:
    """Return ``dropout(value, rate)``. The mask is this member's positions of that of one process."""
    if not rate:
        return value
    shape, order = list(value.shape), memory_order(value)[: value.dim()]
    shape[_dimension(rows)] *= stage._autopipe_team.size
    # the draws follow the order in memory
    ones = torch.ones([shape[dimension] for dimension in order], dtype=value.dtype, device=value.device)
    mask = unpacked(functional.dropout(ones, rate, training=True), shape, [*order, *[0] * len(order)])
    return value * _own(mask, rows, stage._autopipe_team)
