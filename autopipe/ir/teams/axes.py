"""``Axis``: one size of the model along which a team of ``t`` members can shard parameters and values.

Each member holds the same ``1/t`` of every tensor that carries the axis, and all of every other tensor. If ``t`` does
not divide a vocabulary, the last members have zeros in place of what is missing, its *padding*, as Megatron-LM pads
vocabularies. Padding is in memory only: it takes part in no sum, its gradient is zero, and it is neither written to a
file nor compared. A member runs every node of the graph on what it holds, with these changes:

- a number in the arguments of a call that counts along the axis is divided by ``t`` (``Rewrite``);
- a value that all members have enters calls of the axis: the members' gradients of it are summed (``Entry``);
- a call adds over the axis: the members' results are summed (``Sum``);
- a call draws random numbers for a value that carries the axis: the whole mask is drawn, and cut (``draws``).

``trace.axes`` finds the axes. They are derived from the graph, so they are not in its digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autopipe.ir.artifact import OMIT_DEFAULT

ADDED = "added"  # the members' results are summed: products and sums over the axis
ADDED_BEFORE_BIAS = (
    "added_before_bias"  # linear, addmm, ...: the product is summed, and the bias is added once, after it
)
LOOKED_UP = "looked_up"  # embedding: a member returns zeros for a row that another has, and the results are summed
CROSS_ENTROPY = "cross_entropy"  # its maximum, its sum of exponentials and its target's logit come from all members
LOG_SOFTMAX = "log_softmax"  # its maximum and its sum of exponentials do; the result carries the axis
MULTIHEAD = "multihead"  # nn.MultiheadAttention: a member has size/t heads, and its output is added before the bias
PICKED = "picked"  # nll_loss: the member that has the target's column contributes it
BY_INDEX = (LOOKED_UP, CROSS_ENTROPY, LOG_SOFTMAX, PICKED)  # sums of a vocabulary: they can leave out padding
SUMS = (ADDED, ADDED_BEFORE_BIAS, LOOKED_UP, CROSS_ENTROPY, LOG_SOFTMAX, PICKED, MULTIHEAD)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a dimension that is ``outer x size of the axis x inner``, in the order of memory."""

    length: int  # of the part; 0: the complete dimension, whose length may differ from batch to batch
    inner: int  # consecutive elements for each step along the axis


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor carries an axis.

    A fused projection ``(3, heads, width)`` is one segment with ``inner = width``. A dimension that is a concatenation
    has several: queries, keys and values of grouped heads, for example.
    """

    name: str  # of the parameter, buffer, constant or value
    dimension: int
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        lengths = [segment.length for segment in self.segments]
        if self.dimension < 0 or not lengths or any(segment.inner < 1 for segment in self.segments):
            raise ValueError(f"{self.name!r} does not say where it carries an axis")
        if len(lengths) > 1 and min(lengths) < 1:
            raise ValueError(f"{self.name!r}: a part of dimension {self.dimension} has no length")

    def ranges(self, length: int, size: int, member: int, team: int) -> tuple[tuple[int, int], ...]:
        """Return the indices of a member along the dimension, as ascending ranges (start, stop).

        ``length``: of the complete dimension; ``size``: of the axis; ``member``: 0 .. ``team`` - 1. A member's tensor
        is the concatenation of these ranges, and padding up to ``share`` elements if the axis does not divide.

        Raises: ValueError if the dimension does not divide, and is not the axis alone.
        """
        lengths = [segment.length or length for segment in self.segments]
        if size % team and self._is_axis(length, size) and 0 <= member < team:
            own = share(size, team)
            return ((min(member * own, size), min((member + 1) * own, size)),)
        if size % team or sum(lengths) != length or not 0 <= member < team:
            raise ValueError(f"{self.name!r}: {length} elements of an axis of {size} cannot be divided by {team}")
        ranges: list[tuple[int, int]] = []
        start = 0
        for segment, part in zip(self.segments, lengths, strict=True):
            period, own = size * segment.inner, size // team * segment.inner
            if part % period:
                raise ValueError(f"{self.name!r}: {part} elements are not a multiple of {period}")
            ranges += [(at, at + own) for at in range(start + member * own, start + part, period)]
            start += part
        return tuple(_joined(ranges))

    def _is_axis(self, length: int, size: int) -> bool:
        return self.segments == (Segment(0, 1),) and length == size

    def local(self, length: int, size: int, team: int) -> int:
        """Return how long a member's part of a dimension of ``length`` is, with padding."""
        return share(size, team) if size % team else length // team

    def whole(self, local: int, size: int, team: int) -> int:
        """Return how long the complete dimension is of which each member has ``local`` elements, with padding."""
        return size if size % team else local * team


def share(size: int, team: int) -> int:
    """Return how much of an axis each of ``team`` members has room for."""
    return -(-size // team)


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


@dataclass(frozen=True, slots=True)
class Rewrite:
    """An integer in the arguments of a call that a member divides by ``t``."""

    node: str
    # of the call as recorded: an index of the positional arguments, or a keyword; then indices inside of tuples.
    # ("size", 2) is element 2 of keyword ``size``; a slice has the indices 0 (start), 1 (stop)
    path: tuple[int | str, ...]
    whole: int  # its value in the complete model; 0: it is computed from sizes of the batch, and divided as it is then


@dataclass(frozen=True, slots=True)
class Entry:
    """A value that all members have, and that calls of the axis read: the members' gradients of it are summed."""

    value: str
    readers: tuple[str, ...]  # the nodes that read it so, in order; other nodes read the value itself


@dataclass(frozen=True, slots=True)
class Sum:
    """A call that adds over the axis."""

    node: str
    how: str  # one of ``SUMS``

    def __post_init__(self) -> None:
        if self.how not in SUMS:
            raise ValueError(f"node {self.node}: {self.how!r} is not one of {', '.join(SUMS)}")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis. A tensor carries it at most once."""

    name: str  # unique in the model: the module that has its parameters, and its size
    size: int
    parameters: tuple[Place, ...]
    values: tuple[Place, ...] = ()
    state: tuple[Place, ...] = field(default=(), metadata=OMIT_DEFAULT)  # buffers and constants
    rewrites: tuple[Rewrite, ...] = field(default=(), metadata=OMIT_DEFAULT)
    entries: tuple[Entry, ...] = field(default=(), metadata=OMIT_DEFAULT)
    sums: tuple[Sum, ...] = field(default=(), metadata=OMIT_DEFAULT)
    # parameters that each member has completely and reads with sharded values: their gradients are summed at the end
    partial: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    # nodes that draw for a value that carries the axis: dropout, and attention with dropout
    draws: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    # nodes that take part: they read or make what carries the axis. In a set, no node takes part in two axes
    nodes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"axis {self.name}: its size must be at least 2, and is {self.size}")
        for places in (self.parameters, self.values, self.state):
            names = [place.name for place in places]
            if len(set(names)) < len(names):
                raise ValueError(f"axis {self.name}: a tensor carries it twice")
        taking_part = {*self.nodes}
        for node in (*(s.node for s in self.sums), *(r.node for r in self.rewrites), *self.draws):
            if node not in taking_part:
                raise ValueError(f"axis {self.name}: node {node!r} does not take part in it")

    @property
    def num_collectives(self) -> int:
        """How many sums over the team a forward and backward pass needs."""
        return len(self.sums) + len(self.entries)

    def local(self, count: int, team: int) -> int:
        """Return what a number that counts along the axis is for a member."""
        return count // self.size * share(self.size, team) if self.size % team else count // team

    def excludes(self, other: Axis) -> bool:
        """Return whether both cannot be in one set: a tensor or a call would be cut along both."""
        ours = {*self.nodes, *(place.name for place in (*self.parameters, *self.state))}
        return any(name in ours for name in (*other.nodes, *(p.name for p in (*other.parameters, *other.state))))


@dataclass(frozen=True, slots=True)
class Shard:
    """How a tensor is cut."""

    place: Place
    size: int  # of the axis


def shards_of(axes: Iterable[Axis]) -> Mapping[str, Shard]:
    """Return how the state of a model is cut, by name."""
    return {place.name: Shard(place, axis.size) for axis in axes for place in (*axis.parameters, *axis.state)}
