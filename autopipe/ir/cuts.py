"""Cuts of a graph: which are legal, and which values cross them. Pure arithmetic over ``Graph``.

A value crosses cut ``i`` if it is made before node ``i`` and read at or after it. Values that depend only on the batch
and on constants (``input_only``) are never sent: every stage that reads one computes it.

A cut is legal unless it would change the result:

- a crossing value is not one tensor (a tuple, a size), so it cannot be sent;
- the node after the cut is glued to the one before it;
- one tensor crosses under two names (a call returned its argument): gradients would be added in another order;
- memory that crosses is changed in place after the cut (the sender's copy, or a view of it, would not change);
- a buffer that the forward updates is used on both sides (each side would have its own copy).

A cut must also leave work on both sides: a stage cannot consist of ``input_only`` nodes alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

from autopipe.ir.graph import Graph, Node
from autopipe.ir.tensor import TensorSpec


class Cuts:
    """The cuts of one graph, computed once. Positions run from 1 to ``len(nodes) - 1``."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._by_name = {node.name: node for node in graph.nodes}

    @functools.cached_property
    def crossing(self) -> tuple[tuple[str, ...], ...]:
        """For every position 0..N, the values that a cut there would send, in the order in which they are made."""
        count = len(self.graph.nodes)
        live: list[list[str]] = [[] for _ in range(count + 1)]
        for index, node in enumerate(self.graph.nodes):
            if node.input_only:
                continue
            last = min(self.graph.last_use.get(node.name, index), count)
            for position in range(index + 1, last + 1 if last < count else count):
                live[position].append(node.name)
        return tuple(tuple(values) for values in live)

    @functools.cached_property
    def legal(self) -> tuple[int, ...]:
        """The legal positions, ascending."""
        count = len(self.graph.nodes)
        allowed = [True] * (count + 1)
        allowed[0] = allowed[count] = False
        self._forbid_unsendable(allowed)
        self._forbid_late_mutation(allowed)
        self._forbid_shared_buffers(allowed)
        work = [index for index, node in enumerate(self.graph.nodes) if not node.input_only]
        if not work:
            return ()
        # all positions between two nodes that do work give the same stages: one of them is enough
        positions, previous = [], work[0]
        for index in work[1:]:
            candidates = [p for p in range(previous + 1, index + 1) if allowed[p]]
            if candidates:
                positions.append(candidates[-1])
            previous = index
        return tuple(positions)

    def _forbid_unsendable(self, allowed: list[bool]) -> None:
        for position, values in enumerate(self.crossing):
            specs = [self._by_name[value].spec for value in values]
            tensors = [(self.storage(v), s) for v, s in zip(values, specs, strict=True) if s and s.requires_grad]
            if None in specs or len(set(tensors)) < len(tensors):
                allowed[position] = False
        for index, node in enumerate(self.graph.nodes):
            if node.glued:
                allowed[index] = False

    def _forbid_late_mutation(self, allowed: list[bool]) -> None:
        first_made: dict[str, int] = {}
        last_change: dict[str, int] = {}
        for index, node in enumerate(self.graph.nodes):
            first_made.setdefault(self.storage(node.name), index)
            for value in node.mutates:
                last_change[self.storage(value)] = index
        for storage, changed in last_change.items():
            owner = self._by_name.get(storage)
            if owner is None or owner.input_only:
                continue
            for position in range(first_made[storage] + 1, changed + 1):
                allowed[position] = False

    def _forbid_shared_buffers(self, allowed: list[bool]) -> None:
        users: dict[str, list[int]] = {}
        written: set[str] = set()
        for index, node in enumerate(self.graph.nodes):
            written.update(node.buffers_written)
            for buffer in dict.fromkeys((*node.buffers, *node.buffers_written)):
                users.setdefault(buffer, []).append(index)
        for buffer in sorted(written):
            for position in range(users[buffer][0] + 1, users[buffer][-1] + 1):
                allowed[position] = False

    def storage(self, value: str) -> str:
        """Return the value that owns the memory of ``value``: itself, or the one of which it is a view."""
        node = self._by_name.get(value)
        while node is not None and node.storage:
            value = node.storage
            node = self._by_name.get(value)
        return value

    def spec(self, value: str) -> TensorSpec:
        """Return the spec of a crossing value. Raises: ValueError if the value is not one tensor."""
        spec = self._by_name[value].spec
        if spec is None:
            raise ValueError(f"{value} is not one tensor")
        return spec

    def crossing_bytes(self, position: int, batch_size: int) -> int:
        """Return the bytes that a cut at ``position`` sends forward for one microbatch."""
        sizes = self.graph.sizes(batch_size)
        return sum(self.spec(value).num_bytes(sizes) for value in self.crossing[position])

    def stage_nodes(self, start: int, stop: int, outputs: Iterable[str] = ()) -> tuple[Node, ...]:
        """Return the nodes that a stage of positions ``start..stop`` runs, in order.

        These are the nodes of its range, without ``input_only`` nodes that it does not read, and the ``input_only``
        nodes of other ranges that it reads, with those that change them in place. ``outputs``: values that it must
        also compute, such as the loss weight.
        """
        graph = self.graph
        wanted = {node.name for node in graph.nodes[start:stop] if not node.input_only}
        todo = [value for name in wanted for value in (*self._by_name[name].inputs, *self._by_name[name].after)]
        todo.extend(outputs)
        while todo:
            node = self._by_name.get(todo.pop())
            if node is None or node.name in wanted or not node.input_only:
                continue
            wanted.add(node.name)
            todo.extend((*node.inputs, *node.after))
        return tuple(node for node in graph.nodes if node.name in wanted)

    def boundaries(self, positions: Sequence[int]) -> list[tuple[str, int, tuple[int, ...]]]:
        """Return (value, producer stage, consumer stages) for every value that crosses one of the cuts."""
        edges = [0, *positions, len(self.graph.nodes)]
        stage_of = [0] * len(self.graph.nodes)
        for stage, (start, stop) in enumerate(itertools.pairwise(edges)):
            stage_of[start:stop] = [stage] * (stop - start)
        consumers: dict[str, set[int]] = {}
        for index, node in enumerate(self.graph.nodes):
            if node.input_only:
                continue
            for value in node.inputs:
                producer = self._by_name.get(value)
                if producer is None or producer.input_only:
                    continue
                if stage_of[self.graph.position[value]] != stage_of[index]:
                    consumers.setdefault(value, set()).add(stage_of[index])
        last = len(positions)
        for value in self.graph.outputs:
            producer = self._by_name.get(value)
            if producer is not None and not producer.input_only and stage_of[self.graph.position[value]] != last:
                consumers.setdefault(value, set()).add(last)
        order = self.graph.position
        return [
            (value, stage_of[order[value]], tuple(sorted(stages)))
            for value, stages in sorted(consumers.items(), key=lambda item: order[item[0]])
        ]
