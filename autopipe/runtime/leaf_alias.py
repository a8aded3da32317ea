"""The boundary of a stage in autograd: received values as the operations of the stage read them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class _Boundary(torch.autograd.Function):
    """Gives its input, and keeps the gradient that arrives, instead of passing it on."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, keep: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.keep = keep
        ctx.set_materialize_grads(False)
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None]:
        if gradient is not None:
            ctx.keep(gradient)
        return None, None


def readable(value: str, leaf: torch.Tensor, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what the operations of a stage read of a received value: an alias of it, or itself if it has no gradient.

    Its gradient, the sum over all readers, is put into ``gradients`` as it arrives. ``leaf.grad`` stays None: autograd
    would copy the gradient there, with the strides of the leaf, and kernels add up in another order over other strides.
    """
    if not leaf.requires_grad:
        return leaf
    keep = functools.partial(gradients.__setitem__, value)
    return _Boundary.apply(leaf, keep)  # type: ignore[no-untyped-call,no-any-return]  # untyped in torch
