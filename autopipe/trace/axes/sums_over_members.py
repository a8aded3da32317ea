"""What members exchange, in one process: sums with the backward pass of a team, lookups, losses over a vocabulary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from autopipe.ir.teams.axes import (
    ADDED,
    ADDED_BEFORE_BIAS,
    CROSS_ENTROPY,
    LOG_SOFTMAX,
    LOOKED_UP,
    PICKED,
    Axis,
    Place,
    share,
)


@dataclass(frozen=True)
class Combination:
    """A call whose result comes from all members."""

    node: fx.Node
    run: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]]  # of each member
    axis: Axis
    team: int
    operand: Place | None  # where the first operand carries the axis
    seeded: Callable[[], contextlib.AbstractContextManager[None]]  # seeds the call's random draws


def cut(whole: Tensor, place: Place, size: int, member: int, team: int) -> Tensor:
    """Return a member's part of a tensor, with padding."""
    dim = place.dimension
    ranges = place.ranges(whole.shape[dim], size, member, team)
    part = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    return _padded(part, dim, place.local(whole.shape[dim], size, team))


def _padded(part: Tensor, dim: int, length: int) -> Tensor:
    shape = list(part.shape)
    shape[dim] = length - shape[dim]
    return torch.cat([part, part.new_zeros(shape)], dim) if shape[dim] else part


def joined(parts: list[Tensor], place: Place, size: int) -> Tensor:
    """Return the tensor of which ``parts`` are the members' parts, without padding."""
    shape = list(parts[0].shape)
    shape[place.dimension] = place.whole(shape[place.dimension], size, len(parts))
    whole = parts[0].new_empty(shape)
    for member, part in enumerate(parts):
        at = 0
        for start, stop in place.ranges(shape[place.dimension], size, member, len(parts)):
            whole.narrow(place.dimension, start, stop - start).copy_(part.narrow(place.dimension, at, stop - start))
            at += stop - start
    return whole


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the members' parts, in the order of the members."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class _Entered(torch.autograd.Function):
    """Forward: as it is. Backward: the members' gradients are summed."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(in_order(gradients) for _ in gradients)


class _Summed(torch.autograd.Function):
    """Forward: the members' values are summed. Backward: as it is."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> tuple[Tensor, ...]:
        return tuple(in_order(parts) for _ in parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def entered(values: list[Tensor]) -> list[Tensor]:
    """Return a value of all members as the calls of an axis read it."""
    return list(_Entered.apply(*values))  # type: ignore[no-untyped-call]  # untyped in torch


def summed(parts: list[Tensor]) -> list[Tensor]:
    """Return the sum of the members' parts, for each."""
    return list(_Summed.apply(*parts))  # type: ignore[no-untyped-call]  # untyped in torch


def _each(combination: Combination) -> list[Any]:
    return [combination.run(member, *arguments) for member, arguments in enumerate(combination.arguments)]


def _added(combination: Combination) -> list[Tensor]:
    return summed(_each(combination))


def _added_before_bias(combination: Combination) -> list[Tensor]:
    """Linear and addmm: the products are summed, then each member adds the complete bias."""
    node, products, biases = combination.node, [], []
    for member, (args, kwargs) in enumerate(combination.arguments):
        if node.op == "call_module":
            x, weight, bias = _operands(combination, member, functional.linear)[0]
            products.append(functional.linear(x, weight))
        elif getattr(node.target, "__name__", "") == "linear":
            operands = [*args, *(kwargs[name] for name in ("weight", "bias") if name in kwargs)]
            products.append(functional.linear(operands[0], operands[1]))
            bias = operands[2]
        else:
            bias, x, weight = (
                args[:3] if len(args) > 2 else (*args, *(kwargs[n] for n in ("mat1", "mat2") if n in kwargs))
            )
            products.append(x @ weight)
        biases.append(bias)
    return [total + bias.to(total.dtype) for total, bias in zip(summed(products), biases, strict=True)]


def _operands(combination: Combination, member: int, function: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which a module calls a function for a member. The function does not run."""
    operands: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not function:
                return func(*args, **(kwargs or {}))
            operands.append((args, kwargs or {}))
            return args[0]

    args, kwargs = combination.arguments[member]
    with Seen():
        combination.run(member, args, kwargs)
    return operands[0]


def _own_rows(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the indices in a member's rows, 0 for those of others, and a mask of the others."""
    local = ids - first
    others = (local < 0) | (local >= count)
    return local.masked_fill(others, 0), others


def _first_of(combination: Combination, member: int) -> tuple[int, int]:
    """Return the first class of a member and its number of classes, without padding."""
    size = combination.axis.size
    each = share(size, combination.team)
    return member * each, min(each, size - member * each)


def _looked_up(combination: Combination) -> list[Tensor]:
    parts = []
    for member, (args, kwargs) in enumerate(combination.arguments):
        operands, named = args, kwargs
        local, others = _own_rows(args[0], *_first_of(combination, member))
        if combination.node.op == "call_module":
            operands, named = _operands(combination, member, functional.embedding)
        weight = operands[1] if len(operands) > 1 else named["weight"]
        padding = operands[2] if len(operands) > 2 else named.get("padding_idx")
        rows = functional.embedding(local, weight)
        if padding is not None:
            rows = torch.where((args[0] == padding)[..., None], rows.detach(), rows)
        parts.append(rows.masked_fill(others[..., None], 0.0))
    return summed(parts)


def _shifted(combination: Combination) -> tuple[list[Tensor], list[Tensor]]:
    """Return logits minus their maximum over all classes, and the log of the sum of their exponentials. No padding."""
    dim = _classes(combination)
    logits = [
        args[0].narrow(dim, 0, _first_of(combination, member)[1])
        for member, (args, _) in enumerate(combination.arguments)
    ]
    highest = logits[0].detach().amax(dim, keepdim=True)
    for other in logits[1:]:
        highest = torch.maximum(highest, other.detach().amax(dim, keepdim=True))
    shifted = [x - highest for x in logits]
    return shifted, [total.log() for total in summed([x.exp().sum(dim, keepdim=True) for x in shifted])]


def _classes(combination: Combination) -> int:
    assert combination.operand is not None
    return combination.operand.dimension


def _picked(combination: Combination, logs: list[Tensor], normalizers: list[Tensor] | None) -> list[Tensor]:
    """Return the loss for log-probabilities, or for logits and their normalizers."""
    dim, entries, targets = _classes(combination), [], []
    for member, (args, kwargs) in enumerate(combination.arguments):
        target = args[1] if len(args) > 1 else kwargs["target"]
        local, others = _own_rows(target, *_first_of(combination, member))
        picked = logs[member].gather(dim, local.unsqueeze(dim)).masked_fill(others.unsqueeze(dim), 0.0)
        entries.append(picked)
        targets.append(target)
    kwargs = {**_settings(combination), **combination.arguments[0][1]}
    losses = []
    for member, entry in enumerate(summed(entries)):
        loss = (-entry if normalizers is None else normalizers[member] - entry).squeeze(dim)
        ignored = targets[member] == kwargs.get("ignore_index", -100)
        loss = loss.masked_fill(ignored, 0.0)
        reduction = kwargs.get("reduction", "mean")
        if reduction == "mean":
            loss = loss.sum() / (~ignored).sum()
        losses.append(loss.sum() if reduction == "sum" else loss)
    return losses


def _settings(combination: Combination) -> dict[str, Any]:
    if combination.node.op != "call_module":
        return {}
    owner = combination.node.graph.owning_module
    assert owner is not None
    module = owner.get_submodule(str(combination.node.target))
    return {name: getattr(module, name) for name in ("ignore_index", "reduction")}


def _cross_entropy(combination: Combination) -> list[Tensor]:
    return _picked(combination, *_shifted(combination))


def _log_softmax(combination: Combination) -> list[Tensor]:
    shifted, normalizers = _shifted(combination)
    parts = [x - total for x, total in zip(shifted, entered(normalizers), strict=True)]
    dim = _classes(combination)
    parts = [
        _padded(part, dim, args[0].shape[dim]) for part, (args, _) in zip(parts, combination.arguments, strict=True)
    ]
    dtype = next((kwargs.get("dtype") for _, kwargs in combination.arguments), None)
    return parts if dtype is None else [part.to(dtype) for part in parts]


def _nll(combination: Combination) -> list[Tensor]:
    return _picked(combination, [args[0] for args, _ in combination.arguments], None)


COMBINED: dict[str, Callable[[Combination], list[Tensor]]] = {
    ADDED: _added,
    ADDED_BEFORE_BIAS: _added_before_bias,
    LOOKED_UP: _looked_up,
    CROSS_ENTROPY: _cross_entropy,
    LOG_SOFTMAX: _log_softmax,
    PICKED: _nll,
}
"""How a call adds over its axis -> its results, for each member."""
