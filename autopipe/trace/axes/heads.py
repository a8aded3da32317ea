"""``nn.MultiheadAttention`` as a team runs it, in one process: each member computes its heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopipe.trace.axes.combined import Combination, summed
from autopipe.trace.axes.drawn import attention


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
        projected = _projected(named)
        query, key, value = (x.reshape(*x.shape[:-1], count, -1).permute(1, 2, 0, 3) for x in projected)
        is_causal = named["is_causal"] and named["key_padding_mask"] is None and not named["need_weights"]
        mask = None if is_causal else named["attn_mask"]
        if named["key_padding_mask"] is not None:
            padding = named["key_padding_mask"][:, None, None, :]
            mask = padding if mask is None else mask + padding
        rate = named["dropout_p"] if named["training"] else 0.0
        if rate:
            output = attention(self._mask_for, query, key, value, mask, rate, is_causal)
        else:
            output = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
        return functional.linear(output.permute(2, 0, 1, 3).flatten(-2), named["out_proj_weight"])

    def _mask_for(self, like: Tensor, rate: float) -> Tensor:
        count = like.shape[1]
        shape = (like.shape[0], count * self._combination.team, *like.shape[2:])
        with self._combination.seeded():
            mask = functional.dropout(torch.ones(shape, dtype=like.dtype), rate, training=True)
        return mask[:, self._member * count : (self._member + 1) * count]


def _projected(named: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return queries, keys and values: one product if they are projections of one tensor, as the module does."""
    inputs, bias = (named["query"], named["key"], named["value"]), named["in_proj_bias"]
    if named["in_proj_weight"] is None:
        weights = [named[f"{letter}_proj_weight"] for letter in "qkv"]
    elif inputs[0] is inputs[1] is inputs[2]:
        return functional.linear(inputs[0], named["in_proj_weight"], bias).chunk(3, -1)
    else:
        weights = named["in_proj_weight"].chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return tuple(functional.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True))


_NAMES = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias",
)  # fmt: skip
