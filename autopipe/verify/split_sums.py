"""Plain training whose products add up in parts, as the members of a team do. Its difference is the noise of a team.

A member has a part of the inner dimension of a product, and the parts are added. Which products of the model are cut is
not asked: all of them are, in their inner dimension for the forward and in their outer one for the backward. Attention
with dropout and losses over a vocabulary use the formulas of ``autopipe.team``, which round differently than the fused
kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autopipe.team import STAGE, attended, vocabulary_cross_entropy

_ALL_HEADS = 1, 1, ((0, 1),)  # ``autopipe.team.Along`` of a mask that is not cut


class SplitSums(TorchFunctionMode):
    """Computes products in ``size`` parts. A call that cannot be split is not changed."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.num_split = 0  # calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call."""
        split, kwargs = _SPLIT.get(func), kwargs or {}
        if func is functional.multi_head_attention_forward:
            with self:  # torch leaves the mode when it calls a function, and this one is written in Python
                return _ATTENTION_MODULE(*args, **kwargs)
        if split is not None:
            result = split(self.size, *args, **kwargs)
            if result is not None:
                self.num_split += 1
                return result
        return func(*args, **kwargs)


def _product(size: int, value: Tensor, weight: Tensor) -> Tensor | None:
    """Return ``value @ weight`` for a weight of shape (inner, outer), or None if there is nothing to split."""
    if weight.dim() != 2 or min(weight.shape) < size:
        return None
    rows = weight.tensor_split(size, 0)
    ends = [0, *itertools.accumulate(row.shape[0] for row in rows)]
    columns = []
    for at in range(size):
        parts = [
            value[..., start:stop] @ row.tensor_split(size, 1)[at]
            for row, (start, stop) in zip(rows, itertools.pairwise(ends), strict=True)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        columns.append(total)
    return torch.cat(columns, -1)


def _linear(size: int, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    product = _product(size, input, weight.t())
    return product if product is None or bias is None else product + bias.to(product.dtype)


def _matmul(size: int, input: Tensor, other: Tensor) -> Tensor | None:
    return _product(size, input, other)


def _addmm(size: int, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor | None:
    product = _product(size, mat1, mat2) if beta == alpha == 1 else None
    return None if product is None else product + input.to(product.dtype)


def _attention(
    size: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if not dropout_p or query.dim() != 4:
        return None
    return attended(STAGE, _ALL_HEADS, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _cross_entropy(size: int, input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    chosen = {name: kwargs.pop(name) for name in ("ignore_index", "reduction") if name in kwargs}
    if args or target.is_floating_point() or any(value not in (None, 0.0) for value in kwargs.values()):
        return None  # weights of classes, or smoothing
    return vocabulary_cross_entropy(STAGE, input, target, 1 if input.dim() > 1 else 0, **chosen)


def _multi_head_attention() -> Callable[..., Any]:
    """Return ``functional.multi_head_attention_forward`` without its dispatch to the mode: its calls are dispatched."""
    function: Any = functional.multi_head_attention_forward
    names = {**vars(functional), "has_torch_function": lambda operands: False}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


_ATTENTION_MODULE = _multi_head_attention()
_SPLIT: dict[Any, Callable[..., Tensor | None]] = {
    functional.linear: _linear,
    functional.scaled_dot_product_attention: _attention,
    functional.cross_entropy: _cross_entropy,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
}
