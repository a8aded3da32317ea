"""``nn.MultiheadAttention`` as a team runs it, in one process: each member computes its heads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from autopipe.trace.axes.combined import summed

if TYPE_CHECKING:
    from autopipe.trace.axes.members import Combination


def multihead(combination: Combination) -> list[tuple[Tensor, None]]:
    """Return the output of each member. The module runs with its own masks and layout, but not with all heads."""
    parts, biases = [], []
    for member, (args, kwargs) in enumerate(combination.arguments):
        mode = _OwnHeads(combination, member)
        with mode:
            parts.append(combination.run(member, args, kwargs)[0])
        biases.append(mode.bias)
    totals = summed(parts)
    return [(total if bias is None else total + bias, None) for total, bias in zip(totals, biases, strict=True)]


class _OwnHeads(torch.overrides.TorchFunctionMode):
    """Replaces the function that the module calls by one for the heads of a member, without the last bias."""

    def __init__(self, combination: Combination, member: int) -> None:
        super().__init__()
        self._combination = combination
        self._member = member
        self.bias: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.multi_head_attention_forward:
            return func(*args, **(kwargs or {}))
        named = dict(zip(_NAMES, args, strict=False)) | (kwargs or {})
        self.bias = named["out_proj_bias"]
        return self._own(named), None

    def _own(self, named: dict[str, Any]) -> Tensor:
        """Return the partial output [length, batch, width] of the member's heads."""
        count = named["num_heads"] // self._combination.team
        separate = [named.get(f"{letter}_proj_weight") for letter in "qkv"]
        weights = named["in_proj_weight"].chunk(3) if named["in_proj_weight"] is not None else separate
        biases = (None,) * 3 if named["in_proj_bias"] is None else named["in_proj_bias"].chunk(3)
        inputs = named["query"], named["key"], named["value"]
        query, key, value = (
            functional.linear(x, weight, bias).reshape(*x.shape[:-1], count, -1).permute(1, 2, 0, 3)
            for x, weight, bias in zip(inputs, weights, biases, strict=True)
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        if named["attn_mask"] is not None:
            scores = scores + named["attn_mask"]
        if named["key_padding_mask"] is not None:
            scores = scores + named["key_padding_mask"][:, None, None, :]
        attention = self._dropped(scores.softmax(-1), named, count)
        output = (attention @ value).permute(2, 0, 1, 3).flatten(-2)
        return functional.linear(output, named["out_proj_weight"])

    def _dropped(self, weights: Tensor, named: dict[str, Any], count: int) -> Tensor:
        if not named["training"] or not named["dropout_p"]:
            return weights
        shape = (weights.shape[0], named["num_heads"], *weights.shape[2:])
        with self._combination.seeded():
            mask = functional.dropout(torch.ones(shape, dtype=weights.dtype), named["dropout_p"], training=True)
        return weights * mask[:, self._member * count : (self._member + 1) * count]


_NAMES = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias",
)  # fmt: skip
