"""Random draws for values that members share out: every member draws the whole mask and takes its part."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from autopipe.ir.teams.axes import Place
from autopipe.trace.axes.combined import cut

Arguments = list[tuple[tuple[Any, ...], dict[str, Any]]]


def drawn(
    node: fx.Node,
    module: nn.Module,
    arguments: Arguments,
    place: Place,
    size: int,
    team: int,
    seeded: Callable[[], contextlib.AbstractContextManager[None]],
) -> list[Tensor]:
    """Return the results of dropout, or of attention with dropout, for each member."""
    results = []
    for member, (args, kwargs) in enumerate(arguments):

        def mask_for(like: Tensor, rate: float, member: int = member) -> Tensor:
            shape = list(like.shape)
            shape[place.dimension] *= team
            with seeded():
                mask = functional.dropout(torch.ones(shape, dtype=like.dtype), rate, training=True)
            return cut(mask, place, size, member, team)

        if node.op == "call_module":
            rate = module.get_submodule(str(node.target)).p
            results.append(args[0] * mask_for(args[0], float(rate)))  # type: ignore[arg-type]  # of nn.Dropout
        elif getattr(node.target, "__name__", "") == "scaled_dot_product_attention":
            results.append(attention(mask_for, *args, **kwargs))
        else:
            rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            results.append(args[0] * mask_for(args[0], rate))
    return results


def attention(
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
    """Fused attention, with the formula of its documentation and a mask of its own."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        lower = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~lower, float("-inf"))
    if attn_mask is not None:
        is_allowed = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if is_allowed else scores + attn_mask
    weights = scores.softmax(-1)
    return (weights * mask_for(weights, dropout_p)) @ value
