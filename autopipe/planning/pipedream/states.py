"""The states that a cut can leave a DAG in: its ideals, or the prefixes of one linear order.

An *ideal* holds with every layer all that it depends on: what stands on one side of a cut. A stage is the difference
of two nested ideals. All of them together (the lattice) lose nothing; where there are too many, the prefixes of one
topological order are used, of two different orders, and the better result is kept. Branches are never collapsed: that
alone costs up to 4 times the optimum.

The value of an ideal's cut is what is made inside and used outside, each once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopipe.errors import PlanError
from autopipe.planning.pipedream.file_format import LayerGraph

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class States:
    """``n`` states, the empty one first, the whole graph last, each behind all that lie inside it.

    ``pointers``/``supersets``: the states that hold state i and more are ``supersets[pointers[i]:pointers[i+1]]``.
    ``seconds``, ``parameters``, ``activations``: sums over the ideal. ``crossing``: bytes across its cut. ``chain``:
    every state holds the one before it. ``ideals``: bit sets of layers.
    """

    pointers: npt.NDArray[np.int64]
    supersets: npt.NDArray[np.int32]
    seconds: Floats
    parameters: Floats
    activations: Floats
    crossing: Floats
    chain: bool
    ideals: tuple[int, ...]
    space: str

    @property
    def count(self) -> int:
        """How many states."""
        return len(self.seconds)


class Dag:
    """Neighbours of every layer, in file order."""

    def __init__(self, graph: LayerGraph) -> None:
        self.graph = graph
        self.count = len(graph.names)
        self.after: list[list[int]] = [[] for _ in range(self.count)]
        self.before: list[list[int]] = [[] for _ in range(self.count)]
        for a, b in graph.edges:
            self.after[a].append(b)
            self.before[b].append(a)

    def order(self, *, deep: bool, ties: str = "first") -> list[int]:
        """Return a topological order: ``deep`` finishes a branch before the next one, else level by level.

        Of the layers that are free at once goes first the "first" or "last" in the file, or the one "listed" first by
        the edges of the layer that freed them.

        Raises: PlanError when the graph has a cycle.
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
        """Return the prefixes of an order as states."""
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
        """Return a number that the ideals are at least: layers of one depth need none of one another."""
        depth = [0] * self.count
        for layer in self.order(deep=False):
            for other in self.after[layer]:
                depth[other] = max(depth[other], depth[layer] + 1)
        return 1 + sum((1 << width) - 1 for width in Counter(depth).values())

    def ideals(self, order: Sequence[int], most: int) -> list[int] | None:
        """Return every ideal as a bit set over ``order``, by size, or None when there are more than ``most``."""
        if self.least_ideals() > most:
            return None
        place = {layer: index for index, layer in enumerate(order)}
        needs = [0] * self.count
        followers: list[list[int]] = [[] for _ in range(self.count)]
        for a, b in self.graph.edges:
            needs[place[b]] |= 1 << place[a]
            followers[place[a]].append(place[b])
        # each ideal with the layers that can join it, as bit sets both
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
                    # asked of each one: a level alone can be as large as all memory
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
        """Return the ideals as states, with the pairs that are nested; None when these are more than ``most_pairs``."""
        from autopipe.planning.pipedream.kernels import nested_pairs

        n, words = self.count, (self.count + 63) // 64
        packed = b"".join(ideal.to_bytes(words * 8, "little") for ideal in ideals)
        bits = np.frombuffer(packed, dtype=np.uint8).reshape(len(ideals), -1)
        sizes = np.array([ideal.bit_count() for ideal in ideals])
        words_of = np.frombuffer(packed, dtype=np.uint64).reshape(len(ideals), words)
        pointers, supersets = nested_pairs(words_of, sizes, most_pairs)
        if pointers[-1] > most_pairs:
            return None
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
