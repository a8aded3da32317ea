"""Cut the batch of a call into parts along the samples, and join the outputs of the parts. Plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class UncutError(ValueError):
    """A batch that has no samples to divide."""


@dataclass(frozen=True)
class Cut:
    """The parts of one call of the model."""

    sizes: tuple[int, ...]  # samples of each part
    parts: tuple[tuple[Any, Any], ...]  # (args, kwargs) of each part
    tensors: tuple[bool, ...]  # for each flat argument, whether it is divided


def cut(args: Any, kwargs: Any, count: int) -> Cut:
    """Divide the arguments of a call into at most ``count`` parts of as equal sizes as possible, larger ones first.

    The first tensor with a dimension gives the number of samples. Each tensor with as many in dimension 0 is divided
    there; each part receives all other arguments whole. Fewer samples than ``count`` give parts of one sample.

    Raises: UncutError if no argument is a tensor with a dimension and a sample.
    """
    flat, form = pytree.tree_flatten((args, kwargs))
    samples = next((len(value) for value in flat if isinstance(value, Tensor) and value.dim()), 0)
    if not samples:
        raise UncutError("no argument of the model's call is a tensor with a dimension, so there are no samples")
    count = min(count, samples)
    divided = tuple(isinstance(value, Tensor) and value.dim() > 0 and len(value) == samples for value in flat)
    pieces = [value.tensor_split(count) if own else None for value, own in zip(flat, divided, strict=True)]
    parts = []
    for i in range(count):
        values = [value if piece is None else piece[i] for value, piece in zip(flat, pieces, strict=True)]
        parts.append(pytree.tree_unflatten(values, form))
    sizes = tuple(samples // count + (i < samples % count) for i in range(count))
    return Cut(sizes, tuple(parts), divided)


def joined(outputs: list[Any]) -> Any:
    """Return one output for the outputs of parts: tensors joined along dimension 0, other values of the first part."""
    columns = zip(*(pytree.tree_leaves(output) for output in outputs), strict=True)
    values = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return pytree.tree_unflatten(values, pytree.tree_structure(outputs[0]))


def call_in_parts(call: Callable[..., Any], args: Any, kwargs: Any, count: int) -> Any:
    """Call a model on each part, in order, and join. What ``--num-microbatches`` computes, in one process."""
    return joined([call(*own, **keywords) for own, keywords in cut(args, kwargs, count).parts])
