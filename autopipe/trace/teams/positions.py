"""Find the values of which the members of a team can have different positions (``autopipe.sequence``).

Where a call computes every position of its operands alone, a member can compute its own positions only. A *length* is
a size of the batch that sums over the team carry, such as that of the tokens. What a call does with it is known from
the rules of ``trace.axes``: a call without a rule, or one that needs all positions, gets them by an all-gather.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopipe.ir.graph import Node, Symbol
from autopipe.ir.teams.axes import ADDED, ADDED_BEFORE_BIAS, LOOKED_UP, MULTIHEAD, Axis, Rewrite
from autopipe.trace.axes.dimension_factors import Dims
from autopipe.trace.axes.find import Reader
from autopipe.trace.result import Capture

FEWEST = 2
"""Positions of a member, at least: a dimension of one element has no place in the order in memory, which the draws of a
dropout follow, and ``squeeze()`` removes it."""
_BORDERS = (ADDED, ADDED_BEFORE_BIAS, LOOKED_UP, MULTIHEAD)  # sums whose results can be scattered


@dataclass(frozen=True)
class Place:
    """Where a value has its positions."""

    dimension: int
    length: int | Symbol | None  # of all positions, if the dimension is a multiple of it; None: the dimension


@dataclass(frozen=True)
class Positions:
    """What the members have by position."""

    leaves: Mapping[str, int]  # value -> the length along which a member has its own positions
    places: Mapping[tuple[str, int], Place]  # (value, length) -> where any value has it
    rewrites: Mapping[str, tuple[Rewrite, ...]]  # call of a member's positions -> sizes that are divided
    partial: tuple[str, ...]  # parameters read with a member's positions: their gradients are summed over the members
    symbols: frozenset[str]  # of the sizes that must be multiples of the number of members

    @property
    def is_empty(self) -> bool:
        """Whether every member has all positions of all values."""
        return not self.leaves


def find_positions(capture: Capture, axes: Sequence[Axis], team: int) -> Positions:
    """Return the positions of a complete model whose team of ``team`` members shards ``axes``. It runs nothing."""
    return _Finder(capture, axes, team).find()


class _Finder:
    def __init__(self, capture: Capture, axes: Sequence[Axis], team: int) -> None:
        self._graph, self._team = capture.graph, team
        self._reading = Reader(capture.graph, capture.module).read()
        self._lengths = self._reading.leaves
        self._calls = {node.name: node for node in capture.module.graph.nodes}
        self._described = {node.name: node for node in self._graph.nodes}
        self._specs = {entry.name: entry.spec for entry in self._graph.inputs}
        self._specs |= {node.name: node.spec for node in self._graph.nodes if node.spec is not None}
        self._in_axes = {name for axis in axes for name in axis.nodes}
        self._cut = {place.name for axis in axes for place in (*axis.parameters, *axis.state)}
        self._partial = {(node, name) for axis in axes for name in axis.partial for node in axis.nodes}
        self._borders = {s.node: s.how for axis in axes for s in axis.sums if s.how in _BORDERS}
        self._needs_all: dict[str, set[int]] = defaultdict(set)
        for node, _, added in self._reading.roles.sums:
            self._needs_all[node].update(self._lengths.everything(added))
        changed = {value for node in self._graph.nodes for value in node.mutates}
        storage: dict[str, str] = {}
        for entry in self._graph.nodes:
            storage[entry.name] = storage.get(entry.storage, entry.storage) or entry.name
        owners = {storage.get(value, value) for value in changed}
        self._changed = {name for name, owner in storage.items() if owner in owners} | owners
        self._places: dict[tuple[str, int], Place | None] = {}
        self._not_divided: set[str] = set()  # calls that read a parameter which others read with all positions

    def find(self) -> Positions:
        candidates = self._candidates()
        while True:
            leaves = self._assigned(candidates)
            mixed = self._mixed(leaves)
            if not mixed:
                return self._positions(leaves)
            self._not_divided |= mixed

    # --- lengths ------------------------------------------------------------------------------------------------------

    def _candidates(self) -> list[int]:
        """Return the lengths that can be divided, those of most bytes first."""
        inputs = {entry.name: self._dims(entry.name) or [] for entry in self._graph.inputs}
        samples: set[int] = set()
        if self._graph.symbols:
            first = self._graph.symbols[0]
            samples.update(self._lengths.flat(inputs[first.input][first.dimension]))
        else:
            samples.update(leaf for dims in inputs.values() if dims for leaf in self._lengths.flat(dims[0]))
        # what sharded weights carry is a width of the model
        weights = [dimension for name in self._cut for dimension in self._reading.state.get(name, ())]
        others = samples | {leaf for dimension in weights for leaf in self._lengths.flat(dimension)}
        lengths: dict[int, int] = {}
        for name in self._borders:
            dims = self._dims(self._result(name))
            for leaf in {leaf for dimension in dims or [] for leaf in self._lengths.flat(dimension)}:
                if leaf in self._sizes and self._divides(leaf) and leaf not in others and leaf not in lengths:
                    lengths[leaf] = self._bytes(self._assigned([leaf]))
        return sorted((leaf for leaf, count in lengths.items() if count), key=lambda leaf: -lengths[leaf])

    def _divides(self, leaf: int) -> bool:
        """Return whether each member can have equally many positions of a length, and at least ``FEWEST``."""
        return self._lengths.size[leaf] % self._team == 0 and self._lengths.size[leaf] >= FEWEST * self._team

    @functools.cached_property
    def _sizes(self) -> dict[int, int | Symbol]:
        """Return the size of each leaf that is a dimension: a number, or a size of the batch that may vary."""
        by_name = {symbol.name: symbol for symbol in self._graph.symbols}
        sizes: dict[int, int | Symbol] = {}
        for name, spec in self._specs.items():
            for size, dimension in zip(spec.shape, self._dims(name) or (), strict=False):
                leaves = self._lengths.flat(dimension)
                if len(leaves) == 1 and (isinstance(size, int) or size in by_name):
                    sizes.setdefault(leaves[0], size if isinstance(size, int) else by_name[size])
        return sizes

    def _bytes(self, leaves: Iterable[str]) -> int:
        sizes = {symbol.name: symbol.hint for symbol in self._graph.symbols}
        return sum(self._specs[name].num_bytes(sizes) for name in leaves if name in self._specs)

    # --- values -------------------------------------------------------------------------------------------------------

    def _dims(self, name: str) -> Dims | None:
        dims = self._reading.values.get(name)
        return dims if isinstance(dims, list) else None

    def _result(self, border: str) -> str:
        """Return the value that a sum returns: that of a tuple is its first entry."""
        if self._borders[border] != MULTIHEAD:
            return border
        return str(next(iter(self._calls[border].users)).name)

    def _place(self, name: str, leaf: int) -> Place | None:
        """Return where a value has a length; None if it has none, or several."""
        if (name, leaf) not in self._places:
            self._places[name, leaf] = self._look_up_place(name, leaf)
        return self._places[name, leaf]

    def _look_up_place(self, name: str, leaf: int) -> Place | None:
        dims = self._dims(name)
        at = [i for i, dimension in enumerate(dims or []) if leaf in {*self._lengths.everything(dimension)}]
        if dims is None or len(at) != 1:
            return None
        flat = self._lengths.flat(dims[at[0]])
        if flat.count(leaf) != 1 or not self._follows(name, at[0], leaf):
            return None
        if flat[0] == leaf:
            return Place(at[0], None)
        if flat[-1] == leaf:
            return Place(at[0], self._sizes.get(leaf, self._lengths.size[leaf]))
        return None

    def _follows(self, name: str, dimension: int, leaf: int) -> bool:
        """Return whether a dimension of a value grows with a length of the batch, as another batch may have it.

        A slice of as many positions as the captured batch happens to have does not.
        """
        length, spec = self._sizes.get(leaf), self._specs.get(name)
        if spec is None or not isinstance(length, Symbol):
            return True
        hints = {symbol.name: symbol.hint for symbol in self._graph.symbols}
        longer = hints | {length.name: 2 * length.hint}
        return spec.concrete(longer)[dimension] == 2 * spec.concrete(hints)[dimension]

    def _has(self, name: str, leaf: int) -> bool:
        dims = self._reading.values.get(name) or self._reading.state.get(name)
        every = [dims] if isinstance(dims, list) else [*(dims or ())]
        return any(leaf in self._lengths.everything(dimension) for part in every for dimension in part or [])

    # --- calls --------------------------------------------------------------------------------------------------------

    def _divisible(self, node: Node, leaf: int) -> bool:
        """Return whether a member can compute its own positions of a call, from its own positions of the operands."""
        state = (*node.parameters, *node.buffers, *node.constants)
        if (
            node.name in self._in_axes | self._reading.not_followed | self._changed | self._not_divided
            or node.spec is None
            or node.mutates
            or node.buffers_written
            or node.opaque
            or (node.num_random and not self._is_dropout(node))
            or leaf in self._lengths.whole_in(node.name) | self._needs_all[node.name]
            or self._place(node.name, leaf) is None
            or any(self._has(name, leaf) for name in state)
        ):
            return False
        operands = [value for value in node.inputs if self._has(value, leaf)]
        return all(self._place(value, leaf) is not None and value not in self._changed for value in operands)

    def _is_dropout(self, node: Node) -> bool:
        if node.kind == "call_module":
            return node.module_type == "Dropout"
        return node.target.rpartition(".")[2] == "dropout"

    def _scatters(self, border: str, leaf: int) -> bool:
        """Return whether the result of a sum can be divided by position, and a call can use it so."""
        node, result = self._described[border], self._result(border)
        if {border, result} & (self._not_divided | self._changed) or self._place(result, leaf) is None:
            return False
        added = {str(operand) for at, operand in self._reading.roles.biases if at == border}
        if added & {*node.inputs} or any(self._has(name, leaf) for name in node.parameters if name not in self._cut):
            return False
        readers = [self._described.get(user.name) for user in self._calls[result].users]
        return any(reader is not None and self._divisible(reader, leaf) for reader in readers)

    def _assigned(self, lengths: Sequence[int]) -> dict[str, int]:
        """Return the length of each value of which a member has its own positions."""
        leaves: dict[str, int] = {}
        for node in self._graph.nodes:
            if node.name in self._borders:
                chosen = [leaf for leaf in lengths if self._scatters(node.name, leaf)]
                if chosen:
                    leaves[self._result(node.name)] = chosen[0]
                continue
            if node.name in leaves:
                continue
            for value in node.inputs:
                if value in leaves and self._divisible(node, leaves[value]):
                    leaves[node.name] = leaves[value]
                    break
        return leaves

    def _mixed(self, leaves: Mapping[str, int]) -> set[str]:
        """Return the calls of own positions that read a parameter which another call reads with all positions."""
        own, others = defaultdict(set), set[str]()
        for node in self._graph.nodes:
            for name in self._trained(node):
                if self._reads_own(node, leaves):
                    own[name].add(node.name)
                elif (node.name, name) not in self._partial:
                    others.add(name)
        return {node for name, nodes in own.items() if name in others for node in nodes}

    def _trained(self, node: Node) -> list[str]:
        return [p for p in node.parameters if p not in self._cut and self._graph.parameters[p].requires_grad]

    def _reads_own(self, node: Node, leaves: Mapping[str, int]) -> bool:
        """Return whether a call reads its whole parameters with a member's positions: a sum adds its bias to them."""
        return (self._result(node.name) if node.name in self._borders else node.name) in leaves

    def _positions(self, leaves: Mapping[str, int]) -> Positions:
        places: dict[tuple[str, int], Place] = {}
        for leaf in {*leaves.values()}:
            for name in (*self._described, *(entry.name for entry in self._graph.inputs)):
                place = self._place(name, leaf)
                if place is not None:
                    places[name, leaf] = place
        rewrites: dict[str, list[Rewrite]] = defaultdict(list)
        for node, path, value, counted in self._reading.roles.literals:
            if leaves.get(node, -1) in {*self._lengths.everything(counted)}:
                rewrites[node].append(Rewrite(node, path, value))
        partial = [
            name
            for node in self._graph.nodes
            if self._reads_own(node, leaves)
            for name in self._trained(node)
            if (node.name, name) not in self._partial
        ]
        sizes = [self._sizes[leaf] for leaf in {*leaves.values()}]
        divided = {size.name for size in sizes if isinstance(size, Symbol)}
        every = {node: tuple(entries) for node, entries in rewrites.items()}
        return Positions(dict(leaves), places, every, tuple(dict.fromkeys(partial)), frozenset(divided))
