"""Combine two recordings at two shapes of the batch to one graph for every batch size and for variable lengths.

A number that is the same in both is a constant; one that differs is arithmetic over the sizes (``sizes.Size``) and is
written into the graph, starting from ``input.size(0)``. Fake tensors cost the same at any size, so the second batch is
large: it reveals code that depends on the number of samples or the length of a sequence. Verification then tries a
third shape.

This is about three times as fast as one recording with a symbolic size, which is the fallback.

The arithmetic of a number follows from its values at the two shapes::

    the same twice    a constant
    k*u + c           u: the batch size, or a length
    v*(k*u + c)       v: the batch size; u: a length
    k*u*w             the batch size squared, the product of two lengths, all of them together
    k*(u + w + ...)   a sum of lengths, such as the boxes of all images

Two shapes suffice, because the differences between them are prime numbers: a linear function of one size is not a
linear function of another, unless a factor is a multiple of that prime. A sum is found if each difference exceeds the
sum of the smaller ones. Verification then tries a third shape on real numbers.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from autopipe.trace.record.follow import Followed
from autopipe.trace.sizes.align import GraphsDiffer, aligned, merged

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_MOST_OF_SUM = 16  # the largest multiple of a sum of lengths that is tried


class SymbolicSizes:
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


@dataclass(frozen=True, slots=True)
class Size:
    """The size ``times * (factor * (of + also) + offset)``: ``times`` and ``of`` are products, ``also`` is a sum."""

    factor: int
    offset: int
    of: tuple[int, ...] = (0,)  # indices of the sizes that are multiplied; 0 is the batch size, then the lengths
    times: tuple[int, ...] = ()  # likewise
    also: tuple[int, ...] = ()  # indices of further lengths, which are added

    @classmethod
    def through(cls, first: tuple[tuple[int, ...], int], second: tuple[tuple[int, ...], int]) -> Size:
        """Return the arithmetic for the numbers at two shapes, each given as (batch size and lengths, number).

        Raises: GraphsDiffer if no supported form matches.
        """
        (s, x), (t, y) = first, second
        sizes: list[Size] = []
        for times, of in _forms(len(s)):
            a, b = _product(s, times), _product(t, times)
            if not a or x % a or y % b:
                continue
            u, v = _product(s, of), _product(t, of)
            if u == v:
                continue
            factor, rest = divmod(y // b - x // a, v - u)
            offset = x // a - factor * u
            # through two points a square looks like a line far below zero
            if not rest and (not offset or (len(of) == 1 and offset > -u * v)):
                sizes.append(cls(factor, offset, of, times))
        if not sizes:
            sizes.extend(_sums(s, t, x, y))
        if not sizes:
            raise GraphsDiffer(f"no formula gives size {x} at {_shape(s)} and {y} at {_shape(t)}")
        return next((size for size in sizes if not size.offset), sizes[0])

    def __str__(self) -> str:
        inner = "*".join(f"s{index}" for index in self.of)
        if self.also:
            inner = "+".join([inner, *(f"s{index}" for index in self.also)])
            inner = f"({inner})" if self.factor != 1 else inner
        if self.factor != 1:
            inner = f"{inner}*{self.factor}"
        if self.offset:
            inner = f"{inner}{self.offset:+d}"
        if not self.times:
            return inner
        return "*".join([*(f"s{index}" for index in self.times), f"({inner})" if self.offset else inner])


def _forms(count: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the (times, of) pairs to try, the simplest first. ``count``: 1 for the batch size, plus the lengths."""
    lengths = range(1, count)
    for index in range(count):
        yield (), (index,)
    for index in lengths:
        yield (0,), (index,)
    yield (), (0, 0)
    for pair in itertools.combinations_with_replacement(lengths, 2):
        yield (), pair
        yield (0,), pair


def _sums(first: tuple[int, ...], second: tuple[int, ...], x: int, y: int) -> Iterator[Size]:
    """Yield multiples of sums of lengths that are ``x`` with the first sizes and ``y`` with the second."""
    apart = [b - a for a, b in zip(first, second, strict=True)]
    for factor in range(1, _MOST_OF_SUM + 1):
        rest, chosen = y - x, list[int]()
        for index in sorted(range(1, len(first)), key=lambda index: -apart[index]):
            if 0 < factor * apart[index] <= rest:
                rest -= factor * apart[index]
                chosen.append(index)
        if not rest and len(chosen) > 1 and factor * sum(first[index] for index in chosen) == x:
            of, *also = sorted(chosen)
            yield Size(factor, 0, (of,), also=tuple(also))


def _product(sizes: tuple[int, ...], which: tuple[int, ...]) -> int:
    return math.prod(sizes[index] for index in which)


def _shape(sizes: tuple[int, ...]) -> str:
    lengths = "".join(f" of length {size}" for size in sizes[1:2]) + "".join(f" and {size}" for size in sizes[2:])
    return f"{sizes[0]} samples{lengths}"
