"""The sizes of a model, as far as its calls divide them: a union-find of *leaves*.

A dimension is a list of leaves, the outermost first, whose sizes multiply to it; one of size 1 is the empty list. Two
dimensions that a call reads together are unified. A view divides a leaf into factors. A slice or a concatenation
divides a leaf into segments. A leaf is only ever divided further, so every list stays valid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from autopipe.ir.teams.axes import Segment

Dimension = list[int]  # leaves
Dims = list[Dimension]  # of one tensor


class NoRuleError(Exception):
    """The axes of a call cannot be followed; the text says why."""


class DimensionFactors:
    """All leaves of one model, by number."""

    def __init__(self) -> None:
        self.size: list[int] = []
        self._up: list[int] = []
        self._factors: dict[int, Dimension] = {}
        self._segments: dict[int, list[Dimension]] = {}
        self._whole: list[tuple[int, str]] = []
        self.call = ""  # that is read now
        self._whole_in: dict[str, list[int]] = {}  # call -> the leaves that it needs whole
        self._varying: list[int] = []

    def new(self, size: int) -> Dimension:
        """Return a dimension with a leaf of its own."""
        if size == 1:
            return []
        self.size.append(size)
        self._up.append(len(self._up))
        return [len(self._up) - 1]

    def fresh(self, shape: Iterable[int]) -> Dims:
        """Return the dimensions of a tensor of which nothing is known."""
        return [self.new(int(size)) for size in shape]

    def root(self, leaf: int) -> int:
        """Return the leaf that stands for all that are unified with this one."""
        while self._up[leaf] != leaf:
            self._up[leaf] = self._up[self._up[leaf]]
            leaf = self._up[leaf]
        return leaf

    def flat(self, leaves: Iterable[int]) -> Dimension:
        """Return the leaves with their present factors in their place."""
        flat = []
        for leaf in leaves:
            root = self.root(leaf)
            flat += self.flat(self._factors[root]) if root in self._factors else [root]
        return flat

    def length(self, leaves: Iterable[int]) -> int:
        """Return the product of the sizes."""
        return math.prod(self.size[leaf] for leaf in leaves)

    def mark_whole(self, leaves: Iterable[int], why: str) -> None:
        """Forbid to shard these leaves, and all that they are or will be unified with."""
        marked = [*leaves]
        self._whole += [(leaf, why) for leaf in marked]
        self._whole_in.setdefault(self.call, []).extend(marked)

    def mark_varying(self, leaves: Iterable[int]) -> None:
        """Mark leaves whose size differs from batch to batch. They stay whole."""
        varying = [*leaves]
        self._varying += varying
        self.mark_whole(varying, "a dimension of the batch")

    def varying(self) -> frozenset[int]:
        """Return the undivided leaves whose size differs from batch to batch."""
        return frozenset(self.everything(self._varying))

    def whole(self) -> dict[int, str]:
        """Return the undivided leaves that must stay whole, each with the first reason."""
        reasons: dict[int, str] = {}
        for leaf, why in self._whole:
            for inner in self.everything([leaf]):
                reasons.setdefault(inner, why)
        return reasons

    def whole_in(self, call: str) -> set[int]:
        """Return the undivided leaves that a call needs whole, whatever other calls do with them."""
        return {*self.everything(self._whole_in.get(call, ()))}

    def everything(self, leaves: Iterable[int]) -> Iterator[int]:
        """Yield the undivided leaves in these, also those inside of segments."""
        for leaf in self.flat(leaves):
            yield leaf
            for segment in self._segments.get(leaf, ()):
                yield from self.everything(segment)

    # --- dividing -----------------------------------------------------------------------------------------------------

    def split(self, leaf: int, outer: int) -> tuple[Dimension, Dimension]:
        """Divide a leaf into ``outer`` times the rest. Raises: NoRuleError."""
        root = self.root(leaf)
        if root in self._segments or not self.size[root] or self.size[root] % outer:
            self.mark_whole([root], "divided unevenly")
            raise NoRuleError("it divides a size unevenly")
        first, second = self.new(outer), self.new(self.size[root] // outer)
        self._factors[root] = [*first, *second]
        return first, second

    def take(self, flat: Dimension, size: int) -> tuple[Dimension, Dimension]:
        """Return the outermost leaves of a flat list that multiply to ``size``, and the rest. Raises: NoRuleError."""
        taken: Dimension = []
        rest, length = list(flat), 1
        while length < size:
            if not rest:
                raise NoRuleError("it changes the number of elements")
            leaf = rest.pop(0)
            if size % (length * self.size[leaf]) == 0:
                taken.append(leaf)
                length *= self.size[leaf]
            elif size % length == 0 and self.size[leaf] % (size // length) == 0:
                first, second = self.split(leaf, size // length)
                taken, rest, length = [*taken, *first], [*second, *rest], size
            else:
                self.mark_whole([leaf], "divided unevenly")
                raise NoRuleError("it divides a size unevenly")
        return taken, rest

    def cut(self, dimension: Dimension, start: int, stop: int) -> Dimension:
        """Return the dimension of the slice ``start:stop``. Raises: NoRuleError."""
        flat = self.flat(dimension)
        length = self.length(flat)
        if (start, stop) == (0, length):
            return dimension
        if len(flat) > 1:
            inner = self.length(flat[1:])
            self.mark_whole(flat[:1], "sliced")
            if start % inner or stop % inner:
                self.mark_whole(flat[1:], "sliced")
                raise NoRuleError("it slices a view")
            piece = self.new((stop - start) // inner)
            self.mark_whole(piece, "sliced")
            return [*piece, *flat[1:]]
        segments = self._segments.setdefault(flat[0], [self.new(length)])
        self._refine(segments, start)
        self._refine(segments, stop)
        inside, at = [], 0
        for segment in segments:
            if start <= at < stop:
                inside.append(segment)
            at += self.length(segment)
        return self.joined(inside)

    def _refine(self, segments: list[Dimension], boundary: int) -> None:
        at = 0
        for index, segment in enumerate(segments):
            length = self.length(segment)
            if at < boundary < at + length:
                flat = self.flat(segment)
                if len(flat) > 1 or flat[0] in self._segments:
                    self.mark_whole(flat, "sliced")
                    raise NoRuleError("it slices a view")
                left, right = self.new(boundary - at), self.new(at + length - boundary)
                self._segments[flat[0]] = [left, right]
                segments[index : index + 1] = [left, right]
                return
            at += length

    def joined(self, segments: Sequence[Dimension]) -> Dimension:
        """Return the dimension that concatenates others."""
        segments = [segment for segment in segments if self.length(segment)] or [*segments[:1]]
        if len(segments) == 1:
            return segments[0]
        dimension = self.new(sum(self.length(segment) for segment in segments))
        self._segments[dimension[0]] = [list(segment) for segment in segments]
        return dimension

    # --- unifying -----------------------------------------------------------------------------------------------------

    def unify(self, left: Iterable[int], right: Iterable[int]) -> None:
        """Unify two dimensions of equal length: their elements belong together, one by one."""
        x, y = self.flat(left), self.flat(right)
        while x and y:
            a, b = self.root(x[0]), self.root(y[0])
            if a == b:
                x, y = x[1:], y[1:]
            elif self.size[a] == self.size[b]:
                self._merge(a, b)
                x, y = self.flat(x[1:]), self.flat(y[1:])
            else:
                larger, smaller = (a, b) if self.size[a] > self.size[b] else (b, a)
                if not self.size[smaller]:
                    break
                try:
                    self.split(larger, self.size[smaller])
                except NoRuleError:
                    break
                x, y = self.flat(x), self.flat(y)
        if x or y:
            self.mark_whole((*x, *y), "divided in two ways")

    def _merge(self, a: int, b: int) -> None:
        ours, theirs = self._segments.get(a), self._segments.pop(b, None)
        self._up[b] = a
        if ours is None and theirs is not None:
            self._segments[a] = theirs
        elif ours is not None and theirs is not None:
            if [self.length(part) for part in ours] != [self.length(part) for part in theirs]:
                for part in (*ours, *theirs):
                    self.mark_whole(part, "sliced in two ways")
                return
            for one, other in zip(ours, theirs, strict=True):
                self.unify(one, other)

    # --- where a dimension carries a leaf -----------------------------------------------------------------------------

    def carried(
        self, dimension: Dimension, varying: frozenset[int] = frozenset()
    ) -> tuple[dict[int, tuple[Segment, ...]], set[int]]:
        """Return where a dimension carries its undivided leaves, and the leaves whose place cannot be expressed.

        ``varying``: the leaves whose size differs from batch to batch, which have no place outside of one of these.
        """
        flat = self.flat(dimension)
        parts = self._segments.get(flat[0]) if len(flat) == 1 else None
        if parts is None:
            places: dict[int, tuple[Segment, ...]] = {}
            for index, leaf in enumerate(flat):
                places[leaf] = (Segment(0, self.length(flat[index + 1 :])),)
            hidden = {leaf for outer in flat if outer in self._segments for leaf in self.everything([outer])}
            hidden |= {leaf for index, leaf in enumerate(flat) if varying.intersection(flat[index + 1 :])}
            return places, hidden | {leaf for leaf in flat if flat.count(leaf) > 1}
        each = [self._in_segment(part, varying) for part in parts]
        common = set.intersection(*({*places} for places, _ in each))
        everywhere = {leaf for part in parts for leaf in self.everything(part)}
        places = {leaf: sum((places[leaf] for places, _ in each), ()) for leaf in common}
        hidden = (everywhere - common).union(*(bad for _, bad in each))
        return {flat[0]: (Segment(0, 1),), **places}, hidden | {flat[0]}

    def _in_segment(self, part: Dimension, varying: frozenset[int]) -> tuple[dict[int, tuple[Segment, ...]], set[int]]:
        places, hidden = self.carried(part, varying)
        length = self.length(part)
        sized = {
            leaf: tuple(Segment(segment.length or length, segment.inner) for segment in segments)
            for leaf, segments in places.items()
        }
        return sized, hidden
