"""Combine two recordings at two shapes of the batch to one graph for every batch size and for variable lengths.

A number that is the same in both is a constant; one that differs is arithmetic over the sizes (``sizes.Size``) and is
written into the graph, starting from ``input.size(0)``. Fake tensors cost the same at any size, so the second batch is
large: it reveals code that depends on the number of samples or the length of a sequence. Verification then tries a
third shape.

This is about three times as fast as one recording with a symbolic size, which is the fallback.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx

from autopipe.trace.record.follow import Followed
from autopipe.trace.sizes.align import GraphsDiffer, aligned, merged
from autopipe.trace.sizes.arithmetic import Size

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Fit:
    """The common graph of two recordings. ``narrow`` becomes the graph."""

    def __init__(self, narrow: Followed, wide: Followed) -> None:
        self.narrow, self.wide = narrow, wide
        if narrow.recorder.answers.fixed.seen != wide.recorder.answers.fixed.seen:
            raise GraphsDiffer("a number that is read from a tensor depends on the size of the batch")
        self.same = aligned(narrow, wide)
        self.arguments: dict[fx.Node, Arguments] = {}
        for other, node in self.same.items():
            if node.op == "output":
                continue
            args = merged(node.args, other.args, node.args, self.same, self._number)
            kwargs = merged(dict(node.kwargs), dict(other.kwargs), dict(node.kwargs), self.same, self._number)
            self.arguments[node] = args, kwargs
            self._shape(node, other)

    def _number(self, first: Any, second: Any) -> Size:
        if type(first) is not int or type(second) is not int:
            raise GraphsDiffer(f"a call has the argument {first!r} in one recording and {second!r} in the other")
        return Size.through((self.narrow.sizes, first), (self.wide.sizes, second))

    def _shape(self, node: fx.Node, other: fx.Node) -> None:
        value, wider = node.meta.get("val"), other.meta.get("val")
        if not isinstance(value, Tensor) or not isinstance(wider, Tensor):
            return
        if value.dim() != wider.dim():
            raise GraphsDiffer(f"a tensor has {value.dim()} dimensions in one recording and {wider.dim()} in the other")
        shape: list[int | str | None] = []
        for a, b in zip(value.shape, wider.shape, strict=True):
            if type(a) is not int or type(b) is not int:
                shape.append(None)  # depends on the data
            else:
                shape.append(a if a == b else str(self._number(a, b)))
        node.meta["shape"] = tuple(shape)

    def apply(self) -> None:
        """Write the sizes into the narrow graph."""
        nodes: dict[Size, fx.Node] = {}
        for node, (args, kwargs) in self.arguments.items():
            if node.op not in ("placeholder", "get_attr"):
                node.args = self._written(args, node, nodes)
                node.kwargs = self._written(kwargs, node, nodes)

    def _written(self, value: Any, user: fx.Node, nodes: dict[Size, fx.Node]) -> Any:
        if isinstance(value, Size):
            return self._node(value, user, nodes)
        if isinstance(value, (list, tuple)):
            items = [self._written(item, user, nodes) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {key: self._written(item, user, nodes) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._written(item, user, nodes) for item in (value.start, value.stop, value.step)))
        return value

    def _node(self, size: Size, user: fx.Node, nodes: dict[Size, fx.Node]) -> fx.Node:
        if size in nodes:
            return nodes[size]
        node = self._product(size.of, user, nodes)
        for index in size.also:
            node = self._insert("call_function", operator.add, (node, self._product((index,), user, nodes)), user)
        if size.factor != 1:
            node = self._insert("call_function", operator.mul, (node, size.factor), user)
        if size.offset:
            node = self._insert("call_function", operator.add, (node, size.offset), user)
        if size.times:
            outer = self._product(size.times, user, nodes)
            node = self._insert("call_function", operator.mul, (outer, node), user)
        nodes[size] = node
        return node

    def _product(self, which: tuple[int, ...], user: fx.Node, nodes: dict[Size, fx.Node]) -> fx.Node:
        """Return the node of one size of the batch, or of a product of several."""
        plain = Size(1, 0, which)
        if plain not in nodes:
            if len(which) == 1:
                place = self.narrow.places[which[0]]
                assert place is not None, "a size that does not differ is in no formula"
                nodes[plain] = self._insert("call_method", "size", place, user)
            else:
                first, second = (self._product((index,), user, nodes) for index in which)
                nodes[plain] = self._insert("call_function", operator.mul, (first, second), user)
        return nodes[plain]

    def _insert(self, kind: str, target: Any, args: tuple[Any, ...], user: fx.Node) -> fx.Node:
        with self.narrow.graph.inserting_before(user):
            node: fx.Node = getattr(self.narrow.graph, kind)(target, args)
        kept = ("source", "frame", "stack", "grad", "autocast", "checkpoint")
        node.meta = {key: user.meta[key] for key in kept if key in user.meta}
        return node
