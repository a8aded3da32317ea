"""Calls of generated stage files in which the members of a team exchange tensors.

A *team* is the processes that run one stage together. Each has ``1/t`` of the tensors that carry an axis
(``ir.teams.axes``), and all of every other tensor. Every member runs the same file. What it exchanges with the others
is written there: ``entered`` and ``summed`` around the products that are cut, and one function for each call that adds
over an axis in another way. Sums are in the order of the members, so all of them have the same result, bit for bit.

Source of ``entered`` and ``summed``: Megatron-LM (arXiv:1909.08053), section 3, where they are called f and g.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from autopipe.ir.teams.axes import Place, Segment, share

Along = tuple[int, int, tuple[tuple[int, int], ...]]
"""Where a value carries an axis: its dimension, the size of the axis, and (length, inner) of each segment."""


class Team(Protocol):
    """The members that run a stage together, as one of them sees it."""

    member: int
    size: int

    def add(self, tensor: Tensor) -> None:
        """Sum a tensor over the members, in place and in their order."""

    def add_parts(self, parts: Tensor) -> Tensor:
        """Return the sum over the members, in their order, of the entry of ``parts`` [size, ...] that is this one's."""

    def gather(self, part: Tensor) -> Tensor:
        """Return the tensors of all members, [size, ...]."""


class Alone:
    """A team of one member."""

    member, size = 0, 1

    def add(self, tensor: Tensor) -> None:
        """Leave the tensor as it is."""

    def add_parts(self, parts: Tensor) -> Tensor:
        """Return the only entry."""
        return parts[0].clone()

    def gather(self, part: Tensor) -> Tensor:
        """Return the tensor as the only entry."""
        return part[None].clone()


def add_together(team: Team, tensors: Sequence[Tensor]) -> None:
    """Sum dense tensors over the members in place, those of one dtype and device in one exchange."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for each in alike.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in each])
        team.add(flat)
        for tensor, total in zip(each, torch.split(flat, [tensor.numel() for tensor in each]), strict=True):
            tensor.copy_(total.view(tensor.shape))


class Member(Protocol):
    """A stage, as the functions here use it."""

    _autopipe_team: Team
    _autopipe_draws: tuple[int, int, int]


class Unplaced:
    """Stands for the stage in a graph: the writer replaces it by ``self``; a graph that runs itself uses ``team``."""

    _autopipe_draws = (0, 0, 0)

    def __init__(self, team: Team) -> None:
        self._autopipe_team = team

    def __repr__(self) -> str:
        return "STAGE"


STAGE = Unplaced(Alone())


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.team.add(total)
        return total, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, team: Team) -> Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        team.add(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def entered(stage: Member, value: Tensor) -> Tensor:
    """Return a value that all members have. Backward: the members' gradients are summed."""
    result: Tensor = _Entered.apply(value, stage._autopipe_team)  # type: ignore[no-untyped-call]  # untyped in torch
    return result


def summed(stage: Member, part: Tensor) -> Tensor:
    """Return the sum of the members' parts. Backward: each member's gradient as it is."""
    result: Tensor = _Summed.apply(part, stage._autopipe_team)  # type: ignore[no-untyped-call]  # untyped in torch
    return result


def summed_linear(stage: Member, value: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``linear(value, weight, bias)`` whose inputs are cut: the products are summed, and the bias added once."""
    total = summed(stage, functional.linear(value, weight))
    return total + bias.to(total.dtype)  # under autocast, the product is narrower


def summed_addmm(stage: Member, bias: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """Return ``addmm(bias, value, weight)`` whose inner dimension is cut."""
    total = summed(stage, value @ weight)
    return total + bias.to(total.dtype)


# --- vocabularies -----------------------------------------------------------------------------------------------------


# ``size``: of the vocabulary, if the members do not divide it. Each then has the same number of rows, and those of the
# last members that are beyond the vocabulary are padding: no sum reads them, and their gradient is zero.


def looked_up(
    stage: Member, ids: Tensor, weight: Tensor, padding_idx: int | None = None, *, size: int | None = None
) -> Tensor:
    """Return ``embedding(ids, weight)`` of a table whose rows are cut: the member that has a row contributes it."""
    return summed(stage, own_rows_of_table(stage, ids, weight, padding_idx, size=size))


def own_rows_of_table(
    stage: Member, ids: Tensor, weight: Tensor, padding_idx: int | None = None, *, size: int | None = None
) -> Tensor:
    """Return the rows of ``embedding(ids, weight)`` that a member has, and zeros for those of others."""
    local, others = _own(stage, ids, weight.shape[0], size)
    rows = functional.embedding(local, weight)
    if padding_idx is not None:
        rows = torch.where((ids == padding_idx)[..., None], rows.detach(), rows)
    return rows.masked_fill(others[..., None], 0.0)


def _range(stage: Member, count: int, size: int | None) -> tuple[int, int]:
    """Return the first row of a member, and how many of its ``count`` rows are not padding."""
    team = stage._autopipe_team
    if size is None:
        return team.member * count, count
    first = team.member * share(size, team.size)
    return first, min(share(size, team.size), size - first)


def _own(stage: Member, ids: Tensor, count: int, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the indices among a member's rows, 0 for those of others, and a mask of the others."""
    first, count = _range(stage, count, size)
    local = ids - first
    others = (local < 0) | (local >= count)
    return local.masked_fill(others, 0), others


def _classes(stage: Member, logits: Tensor, dim: int, size: int | None) -> Tensor:
    """Return a member's logits without padding."""
    count = _range(stage, logits.shape[dim], size)[1]
    return logits if count == logits.shape[dim] else logits.narrow(dim, 0, count)


def _highest(stage: Member, value: Tensor, dim: int) -> Tensor:
    """Return the maximum over a dimension that is cut."""
    team = stage._autopipe_team
    own = value.detach().amax(dim, keepdim=True)
    of_all = own.new_zeros(team.size, *own.shape)
    of_all[team.member] = own  # a sum with zeros is exact
    team.add(of_all)
    return of_all.amax(0)


def _shifted(stage: Member, logits: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return logits minus their maximum over all classes, and the log of the sum of their exponentials."""
    shifted = logits - _highest(stage, logits, dim)
    return shifted, summed(stage, shifted.exp().sum(dim, keepdim=True)).log()


def _entry(stage: Member, values: Tensor, target: Tensor, dim: int, size: int | None) -> Tensor:
    """Return the entry of each sample's class."""
    local, others = _own(stage, target, values.shape[dim], size)
    return summed(stage, values.gather(dim, local.unsqueeze(dim)).masked_fill(others.unsqueeze(dim), 0.0))


def _reduced(loss: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    ignored = target == ignore_index
    loss = loss.masked_fill(ignored, 0.0)
    if reduction == "mean":
        return loss.sum() / (~ignored).sum()
    return loss.sum() if reduction == "sum" else loss


def vocabulary_cross_entropy(
    stage: Member,
    logits: Tensor,
    target: Tensor,
    dim: int,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    size: int | None = None,
) -> Tensor:
    """Return ``cross_entropy(logits, target)`` of logits whose classes, in dimension ``dim``, are cut."""
    shifted, normalizer = _shifted(stage, _classes(stage, logits, dim, size), dim)
    loss = (normalizer - _entry(stage, shifted, target, dim, size)).squeeze(dim)
    return _reduced(loss, target, ignore_index, reduction)


def vocabulary_log_softmax(
    stage: Member, logits: Tensor, dim: int, dtype: torch.dtype | None = None, *, size: int | None = None
) -> Tensor:
    """Return ``log_softmax(logits, dim)`` of logits whose classes are cut; so is the result. Its padding is zero."""
    shifted, normalizer = _shifted(stage, _classes(stage, logits, dim, size), dim)
    result = padded(shifted - entered(stage, normalizer), dim, logits.shape[dim])
    return result if dtype is None else result.to(dtype)


def vocabulary_nll(
    stage: Member,
    logs: Tensor,
    target: Tensor,
    dim: int,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    size: int | None = None,
) -> Tensor:
    """Return ``nll_loss(logs, target)`` of log-probabilities whose classes, in dimension ``dim``, are cut."""
    loss = (-_entry(stage, logs, target, dim, size)).squeeze(dim)
    return _reduced(loss, target, ignore_index, reduction)


# --- parts of tensors -------------------------------------------------------------------------------------------------


def cut(whole: Tensor, place: Place, size: int, member: int, team: int) -> Tensor:
    """Return a member's part of a tensor, with padding. ``size``: of the axis."""
    dim = place.dimension
    length = whole.shape[dim]
    ranges = place.ranges(length, size, member, team)
    part = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    return padded(part, dim, place.local(length, size, team))


def padded(part: Tensor, dim: int, length: int) -> Tensor:
    """Return a tensor with zeros at the end of a dimension, so that this has ``length`` elements."""
    missing = length - part.shape[dim]
    return functional.pad(part, (*(0, 0) * (part.dim() - 1 - dim), 0, missing)) if missing else part


# --- random draws -----------------------------------------------------------------------------------------------------


def _mask(stage: Member, like: Tensor, rate: float, along: Along) -> Tensor:
    """Return a member's part of the dropout mask of the complete value: masks are those of one process."""
    team, (dimension, size, segments) = stage._autopipe_team, along
    shape = list(like.shape)
    shape[dimension] *= team.size
    mask = functional.dropout(torch.ones(shape, dtype=like.dtype, device=like.device), rate, training=True)
    place = Place("mask", dimension, tuple(Segment(*segment) for segment in segments))
    return cut(mask, place, size, team.member, team.size)


def dropped(stage: Member, value: Tensor, rate: float, along: Along) -> Tensor:
    """Return ``dropout(value, rate)`` of a value that is cut."""
    return value * _mask(stage, value, rate, along) if rate else value


def attended(
    stage: Member,
    along: Along,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return ``scaled_dot_product_attention`` with dropout for a member's heads."""
    if not dropout_p:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def mask_for(weights: Tensor, rate: float) -> Tensor:
        return _mask(stage, weights, rate, along)

    return attention_with_mask(mask_for, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def attention_with_mask(
    mask_for: Callable[[Tensor, float], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return ``scaled_dot_product_attention`` with a given dropout mask: the fused kernel draws its own.

    This computes the formula of its documentation. Its memory is that of the scores.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        lower = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~lower, float("-inf"))
    if attn_mask is not None:
        is_allowed = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if is_allowed else scores + attn_mask
    weights = scores.softmax(-1)
    return (weights * mask_for(weights, dropout_p)) @ value


def multihead(
    stage: Member,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    in_weight: Tensor | tuple[Tensor, Tensor, Tensor],
    in_bias: Tensor | None,
    out_weight: Tensor,
    heads: int,
    dropout_p: float = 0.0,
    batch_first: bool = False,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Return what a member's ``heads`` heads add to the result of an ``nn.MultiheadAttention``: [length, batch, width].

    ``in_weight``: of queries, keys and values, in one tensor or in three. Masks are those of the module,
    two-dimensional; with ``is_causal`` there is no ``attn_mask``.
    """
    batched = [x.transpose(0, 1) if batch_first else x for x in (query, key, value)]
    weights = in_weight.chunk(3) if isinstance(in_weight, Tensor) else in_weight
    if query is key is value and isinstance(in_weight, Tensor):
        projected: Sequence[Tensor] = functional.linear(batched[0], in_weight, in_bias).chunk(3, -1)
    else:
        biases = (None, None, None) if in_bias is None else in_bias.chunk(3)
        projected = [functional.linear(x, w, b) for x, w, b in zip(batched, weights, biases, strict=True)]
    q, k, v = (x.reshape(*x.shape[:-1], heads, -1).permute(1, 2, 0, 3) for x in projected)
    mask = None if attn_mask is None else _to_add(attn_mask, query.dtype)
    if key_padding_mask is not None:
        padding = _to_add(key_padding_mask, query.dtype)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    along = 1, heads * stage._autopipe_team.size, ((0, 1),)
    output = attended(stage, along, q, k, v, mask, dropout_p, is_causal)
    return functional.linear(output.permute(2, 0, 1, 3).flatten(-2), out_weight)


def summed_heads(
    stage: Member, part: Tensor, out_bias: Tensor | None, batch_first: bool = False
) -> tuple[Tensor, None]:
    """Return the result of an ``nn.MultiheadAttention``, without weights. ``part``: from ``multihead``."""
    total = summed(stage, part)
    total = total if out_bias is None else total + out_bias
    return total.transpose(0, 1) if batch_first else total, None


def _to_add(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to scores. In a boolean one, True is what ``nn.MultiheadAttention`` leaves out."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
    return mask
