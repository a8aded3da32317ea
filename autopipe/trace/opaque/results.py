"""Fake results that replace those of an opaque module while the model is recorded: shapes derived from real runs.

A dimension of a result equals a dimension of an input, a constant, or a linear function of a dimension of an input,
whichever holds for all batches that were run. If none does, its size depends on the data, and the module cannot be a
node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopipe.trace.opaque.observe import Call, Leaf

_POINTS = 3  # sizes needed to accept a linear function


class Unfit(Exception):  # noqa: N818  # the caller turns it into a note or another attempt
    """The call cannot be a node; the message says why."""


@dataclass(frozen=True)
class Size:
    """A size of a result: ``factor * input.shape[dimension] + offset``, or the constant ``offset``."""

    place: tuple[int, int] | tuple[()]  # (input, dimension); () for a constant
    factor: int
    offset: int

    def of(self, inputs: Sequence[Tensor]) -> Any:
        """Return the size for these inputs, which may have symbolic sizes."""
        if not self.place:
            return self.offset
        size: Any = inputs[self.place[0]].shape[self.place[1]]
        return size if (self.factor, self.offset) == (1, 0) else size * self.factor + self.offset


@dataclass(frozen=True)
class Entry:
    """An entry of a result."""

    leaves: tuple[Any, ...]  # a ``Leaf`` with its sizes for each tensor; other values unchanged
    structure: Any
    why: str = ""  # why the entry is unknown; "" if it is the same in every batch


@dataclass(frozen=True)
class Form:
    """The results of one call of a module."""

    entries: tuple[Entry, ...]
    container: Any  # the structure around the entries
    changed: tuple[int, ...]  # indices of the inputs that any call changed in place
    left: tuple[tuple[str, str], ...]  # attributes that any call bound to tensors

    def results(self, args: Any, kwargs: Any, parameters: Sequence[Tensor], unknown: list[Any]) -> Any:
        """Return the fake result of a call with these fake arguments. Gradients flow to them and to ``parameters``.

        ``unknown``: receives the entries that differ from batch to batch. A later read of their tensors is refused.
        """
        inputs = tensors_of(args, kwargs)
        results = []
        for entry in self.entries:
            leaves = [_tensor_like(leaf, inputs, parameters) if _is_sized(leaf) else leaf for leaf in entry.leaves]
            results.append(pytree.tree_unflatten(leaves, entry.structure))
            if entry.why:
                unknown.append(results[-1])
        return pytree.tree_unflatten(results, self.container)


def form_of(calls: Sequence[Call]) -> Form:
    """Combine the results of the same call in several runs.

    Raises: Unfit if the runs disagree, or if an input or output is not a tensor.
    """
    first = calls[0]
    if not all(call.plain for call in calls):
        raise Unfit("an input is neither a tensor nor a plain value")
    for call in calls[1:]:
        if call.container != first.container or len(call.inputs) != len(first.inputs):
            raise Unfit("the number of its input or output tensors differs from batch to batch")
        if [len(leaf.shape) for leaf in call.inputs] != [len(leaf.shape) for leaf in first.inputs]:
            raise Unfit("the number of dimensions of its inputs differs from batch to batch")
    entries = tuple(_entry(calls, number) for number in range(len(first.outputs)))
    if not any(_is_sized(leaf) for entry in entries if not entry.why for leaf in entry.leaves):
        raise Unfit(next((entry.why for entry in entries if entry.why), "it returns no tensor"))
    changed = tuple(sorted({place for call in calls for place in call.changed}))
    left = tuple(dict.fromkeys(entry for call in calls for entry in call.left))
    return Form(entries, first.container, changed, left)


def tensors_of(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors of a call's arguments, in the order in which ``observe`` numbers them."""
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def _is_sized(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[0], Leaf)


def _entry(calls: Sequence[Call], number: int) -> Entry:
    """Return an entry of a result on which the runs agree, or that of the first run with the reason why not."""
    parts = [call.outputs[number] for call in calls]
    first = parts[0]
    try:
        if any(part.structure != first.structure for part in parts):
            raise Unfit("the number of its output tensors differs from batch to batch")
        places = range(len(first.leaves))
        return Entry(tuple(_leaf(calls, [part.leaves[place] for part in parts]) for place in places), first.structure)
    except Unfit as unfit:
        leaves = (
            (leaf, tuple(Size((), 0, size) for size in leaf.shape)) if isinstance(leaf, Leaf) else leaf
            for leaf in first.leaves
        )
        return Entry(tuple(leaves), first.structure, str(unfit))


def _leaf(calls: Sequence[Call], seen: Sequence[Any]) -> Any:
    first = seen[0]
    if not isinstance(first, Leaf):
        if not isinstance(first, (type(None), bool, int, float, str)):
            raise Unfit(f"it returns a {type(first).__name__}, which is not a tensor")
        if any(type(leaf) is not type(first) or leaf != first for leaf in seen):
            raise Unfit(f"a value that it returns depends on the data ({first!r})")
        return first
    kinds = {(leaf.dtype, len(leaf.shape)) if isinstance(leaf, Leaf) else None for leaf in seen}
    if len(kinds) > 1 or not all(leaf.strided for leaf in seen):
        raise Unfit("the type or number of dimensions of a tensor that it returns differs from batch to batch")
    shared = {leaf.alias for leaf in seen} - {-1}
    whole_inputs = all(
        leaf.alias < 0 or leaf.shape == call.inputs[leaf.alias].shape for call, leaf in zip(calls, seen, strict=True)
    )
    if len(shared) > 1 or not whole_inputs:
        raise Unfit("a tensor that it returns is a part of an input")
    whole = Leaf(
        first.shape,
        first.dtype,
        first.device,
        any(leaf.requires_grad for leaf in seen),
        first.order,
        next(iter(shared), -1),
    )
    return whole, tuple(_size(calls, seen, dimension) for dimension in range(len(first.shape)))


def _size(calls: Sequence[Call], seen: Sequence[Leaf], dimension: int) -> Size:
    """Return a dimension of a result. The same dimension of an input takes precedence."""
    sizes = [leaf.shape[dimension] for leaf in seen]
    places = [(i, d) for i, leaf in enumerate(calls[0].inputs) for d in range(len(leaf.shape))]
    places.sort(key=lambda place: (place[1] != dimension, len(calls[0].inputs[place[0]].shape) != len(seen[0].shape)))
    varying = len(set(sizes)) > 1
    for input_, d in places:
        if [call.inputs[input_].shape[d] for call in calls] == sizes and (varying or d == dimension):
            return Size((input_, d), 1, 0)
    if not varying:
        return Size((), 0, sizes[0])
    for input_, d in places:
        line = _line([call.inputs[input_].shape[d] for call in calls], sizes)
        if line is not None:
            return Size((input_, d), *line)
    raise Unfit(f"the size of a tensor that it returns depends on the data ({', '.join(str(size) for size in sizes)})")


def _line(given: Sequence[int], sizes: Sequence[int]) -> tuple[int, int] | None:
    """Return factor and offset of the line through the points, or None."""
    points = sorted(set(zip(given, sizes, strict=True)))
    if len(points) < _POINTS or len({x for x, _ in points}) < len(points):
        return None
    (a, first), (b, second) = points[:2]
    factor, rest = divmod(second - first, b - a)
    offset = first - factor * a
    return (factor, offset) if not rest and all(x * factor + offset == y for x, y in points) else None


def _tensor_like(leaf: tuple[Leaf, tuple[Size, ...]], inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    about, sizes = leaf
    if about.alias >= 0:
        given = inputs[about.alias]
        return given.view_as(given)
    order = about.order
    shape = [sizes[dimension].of(inputs) for dimension in order]
    device = inputs[0].device if inputs else about.device
    tensor = torch.empty(shape, dtype=about.dtype, device=device)
    tensor = tensor.permute([order.index(dimension) for dimension in range(len(order))]) if order else tensor
    if about.requires_grad and torch.is_grad_enabled():
        for source in (*inputs, *parameters):
            if source.requires_grad:
                return tensor + source.sum().to(tensor.dtype) * 0
    return tensor
