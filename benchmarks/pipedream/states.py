"""The states of a DAG between which stages lie: its ideals, or the prefixes of one linear order.

An *ideal* contains, with every layer, all layers that it depends on: it is one side of a cut. A stage is the difference
of two nested ideals. The set of all ideals (the lattice) contains every plan. If it is too large, the prefixes of
different topological orders are used, and the best result is kept. Branches are never collapsed into one layer, which
can cost up to 4 times the optimum.

The bytes across the cut of an ideal are those of the values produced inside and used outside, each counted once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopipe.errors import PlanError
from benchmarks.pipedream.file_format import LayerGraph

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class States:
    """States from the empty one to the whole graph, each behind all states that it contains."""

    pointers: npt.NDArray[np.int64]  # supersets of state i: ``supersets[pointers[i]:pointers[i+1]]``; empty for a chain
    supersets: npt.NDArray[np.int32]
    seconds: Floats  # of all layers of the state
    parameters: Floats  # bytes, of all layers of the state
    activations: Floats  # bytes, of all layers of the state
    crossing: Floats  # bytes across the cut
    chain: bool  # every state contains the one before it
    ideals: tuple[int, ...]  # bit sets of layers; empty for a chain
    space: str  # the name of the set of states

    @property
    def count(self) -> int:
        """The number of states."""
        return len(self.seconds)


class Dag:
    """A graph of layers, with the neighbours of every layer in the order of the file."""

    def __init__(self, graph: LayerGraph) -> None:
        self.graph = graph
        self.count = len(graph.names)
        self.after: list[list[int]] = [[] for _ in range(self.count)]
        self.before: list[list[int]] = [[] for _ in range(self.count)]
        for a, b in graph.edges:
            self.after[a].append(b)
            self.before[b].append(a)

    def order(self, *, deep: bool, ties: str = "first") -> list[int]:
        """Return a topological order: branch by branch (``deep``), or level by level.

        ``ties``: which of several ready layers is next: the "first" or "last" one in the file, or the one "listed"
        first in the edges of the layer that they waited for.

        Raises: PlanError if the graph has a cycle.
        """
        waiting = [len(before) for before in self.before]
        ready = [layer for layer in range(self.count) if not waiting[layer]]
        if deep != (ties == "last"):
            ready.reverse()
        order, head = [], 0
        while len(ready) > (0 if deep else head):
            if deep:
                layer = ready.pop()
            else:
                layer, head = ready[head], head + 1
            order.append(layer)
            freed = []
            for other in self.after[layer]:
                waiting[other] -= 1
                if not waiting[other]:
                    freed.append(other)
            if ties != "listed":
                freed.sort(reverse=deep != (ties == "last"))
            ready.extend(freed)
        if len(order) < self.count:
            stuck = self.graph.names[next(layer for layer in range(self.count) if waiting[layer])]
            raise PlanError(f"the profile's graph has a cycle through {stuck!r}")
        return order

    def chain_states(self, order: Sequence[int], space: str) -> States:
        """Return the prefixes of an order as states. ``space``: their name."""
        n, graph = self.count, self.graph
        place = [0] * n
        for index, layer in enumerate(order):
            place[layer] = index
        step = [0.0] * (n + 1)
        for layer in range(n):
            if self.after[layer]:
                last = max([place[other] for other in self.after[layer]])
                step[place[layer] + 1] += graph.activation_bytes[layer]
                step[last + 1] -= graph.activation_bytes[layer]
        rows = np.zeros((4, n + 1))
        rows[0, 1:] = [graph.forward_seconds[i] + graph.backward_seconds[i] for i in order]
        rows[1, 1:] = [graph.parameter_bytes[i] for i in order]
        rows[2, 1:] = [graph.activation_bytes[i] for i in order]
        rows[3] = step
        rows = rows.cumsum(axis=1)
        rows[3, 0] = rows[3, n] = 0.0
        empty = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
        return States(*empty, rows[0], rows[1], rows[2], np.maximum(rows[3], 0.0), True, (), space)

    def least_ideals(self) -> int:
        """Return a lower bound of the number of ideals: layers of one depth do not depend on one another."""
        depth = [0] * self.count
        for layer in self.order(deep=False):
            for other in self.after[layer]:
                depth[other] = max(depth[other], depth[layer] + 1)
        return 1 + sum((1 << width) - 1 for width in Counter(depth).values())

    def ideals(self, order: Sequence[int], most: int) -> list[int] | None:
        """Return every ideal as a bit set over ``order``, by size, or None if there are more than ``most``."""
        if self.least_ideals() > most:
            return None
        place = {layer: index for index, layer in enumerate(order)}
        needs = [0] * self.count
        followers: list[list[int]] = [[] for _ in range(self.count)]
        for a, b in self.graph.edges:
            needs[place[b]] |= 1 << place[a]
            followers[place[a]].append(place[b])
        # each ideal with the layers that can be added to it, both as bit sets
        level = {0: sum(1 << i for i in range(self.count) if not needs[i])}
        ideals = [0]
        while level:
            larger: dict[int, int] = {}
            for ideal, free in level.items():
                left = free
                while left:
                    joining = left & -left
                    left ^= joining
                    grown = ideal | joining
                    if grown in larger:
                        continue
                    # checked for each ideal: the ideals of one size alone can exceed the memory
                    if len(ideals) + len(larger) == most:
                        return None
                    freed = free ^ joining
                    for other in followers[joining.bit_length() - 1]:
                        if not needs[other] & ~grown:
                            freed |= 1 << other
                    larger[grown] = freed
            ideals.extend(larger)
            level = larger
        return ideals

    def lattice_states(self, order: Sequence[int], ideals: Sequence[int], most_pairs: int) -> States | None:
        """Return the ideals as states, with their nested pairs, or None if there are more than ``most_pairs``."""
        n, words = self.count, (self.count + 63) // 64
        packed = b"".join(ideal.to_bytes(words * 8, "little") for ideal in ideals)
        bits = np.frombuffer(packed, dtype=np.uint8).reshape(len(ideals), -1)
        sizes = np.array([ideal.bit_count() for ideal in ideals])
        words_of = np.frombuffer(packed, dtype=np.uint64).reshape(len(ideals), words)
        pairs = nested_pairs(words_of, sizes, most_pairs)
        if pairs is None:
            return None
        pointers, supersets = pairs
        inside = np.unpackbits(bits, axis=1, bitorder="little")[:, :n].astype(np.float64)
        graph = self.graph
        columns = np.array(
            [
                [graph.forward_seconds[i] + graph.backward_seconds[i] for i in order],
                [graph.parameter_bytes[i] for i in order],
                [graph.activation_bytes[i] for i in order],
            ]
        )
        sums = inside @ columns.T
        place = {layer: index for index, layer in enumerate(order)}
        outside = np.ascontiguousarray(inside.T == 0.0)
        leaves = np.zeros_like(outside)
        for a, b in graph.edges:
            leaves[place[a]] |= outside[place[b]]
        crossing = (inside * leaves.T) @ columns[2]
        seconds, parameters, activations = (np.ascontiguousarray(sums[:, k]) for k in range(3))
        return States(pointers, supersets, seconds, parameters, activations, crossing, False, tuple(ideals), "lattice")


def nested_pairs(
    words: npt.NDArray[np.uint64], sizes: npt.NDArray[np.int64], most: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]] | None:
    """Return (pointers, supersets): for every state, the later ones that contain it; None if there are more than most.

    ``words``: the states as bit sets of 64-bit words, by size.
    """
    n = len(sizes)
    outside = np.ascontiguousarray(~words.T)
    larger = np.searchsorted(sizes, sizes, side="right")  # two sets of one size do not contain one another
    supersets, total = [], 0
    for i in range(n):
        start = larger[i]
        inside = np.flatnonzero((outside[0, start:] & words[i, 0]) == 0) + start
        for word in np.flatnonzero(words[i, 1:]) + 1:
            inside = inside[(outside[word, inside] & words[i, word]) == 0]
        supersets.append(inside.astype(np.int32))
        total += len(inside)
        if total > most:
            return None
    pointers = np.concatenate([[0], np.cumsum([len(inside) for inside in supersets])])
    return pointers.astype(np.int64), np.concatenate(supersets)


def seconds_between(states: States) -> Floats:
    """Return the seconds of a stage for every pair of states, infinity for those that are not nested."""
    n = states.count
    if states.chain:
        above = np.triu(np.ones((n, n), dtype=bool), k=1)
        return np.where(above, states.seconds[None, :] - states.seconds[:, None], np.inf)
    seconds = np.full((n, n), np.inf)
    begins = np.repeat(np.arange(n), np.diff(states.pointers))
    seconds[begins, states.supersets] = states.seconds[states.supersets] - states.seconds[begins]
    return seconds
