"""``Atoms``: a graph divided at its legal cuts, and which atoms read which value.

The legal cuts divide a graph into ``n`` *atoms*; a stage is a run of atoms ``i..j-1``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph, Node
from autopipe.ir.profile import Measurement, NodeCost
from autopipe.planning.cost.units import Units, recompute_units


class Atoms:
    """A graph at one microbatch size, by atoms."""

    def __init__(self, graph: Graph, cuts: Cuts, measurement: Measurement) -> None:
        self.graph = graph
        self.cuts = cuts
        self.costs: Mapping[str, NodeCost] = measurement.costs
        self.keepers: Mapping[str, str] = measurement.keepers
        self.casts: Mapping[str, int] = measurement.casts
        self.sizes: Mapping[str, int] = graph.sizes(measurement.microbatch_size)
        self.edges: tuple[int, ...] = (0, *cuts.legal, len(graph.nodes))  # the start of every atom, and the end
        self.count = len(self.edges) - 1
        self.of_position: list[int] = []  # the atom of every node, by position
        for index, (start, stop) in enumerate(itertools.pairwise(self.edges)):
            self.of_position.extend([index] * (stop - start))
        self.by_name: Mapping[str, Node] = {node.name: node for node in graph.nodes}
        self.reads: Mapping[str, set[int]] = self._atoms_that_read()

    def _atoms_that_read(self) -> dict[str, set[int]]:
        """Return, for every value, the atoms whose stage needs it, directly or through input-only nodes."""
        reads: dict[str, set[int]] = {}
        for index, node in enumerate(self.graph.nodes):
            if not node.input_only:
                for value in node.inputs:
                    reads.setdefault(value, set()).add(self.of_position[index])
                for value in node.after:
                    if self.is_input_only(value):
                        reads.setdefault(value, set()).add(self.of_position[index])
        for value in self.graph.outputs:
            reads.setdefault(value, set()).add(self.count - 1)
        for node in reversed(self.graph.nodes):
            if node.input_only and node.name in reads:
                for value in (*node.inputs, *node.after):
                    reads.setdefault(value, set()).update(reads[node.name])
        return reads

    def is_input_only(self, value: str) -> bool:
        """Return whether the value is computed from the batch alone, by every stage that reads it."""
        node = self.by_name.get(value)
        return node is not None and node.input_only

    @functools.cached_property
    def units(self) -> Units:
        """What recompute by block runs again."""
        return recompute_units(self)

    @functools.cached_property
    def work(self) -> list[tuple[int, Node]]:
        """The nodes that exactly one stage runs, in order, each with its atom."""
        return [(self.of_position[i], node) for i, node in enumerate(self.graph.nodes) if not node.input_only]

    @functools.cached_property
    def copied(self) -> list[Node]:
        """The input-only nodes that some stage reads. Every stage that reads one runs it."""
        return [node for node in self.graph.nodes if node.input_only and node.name in self.reads]

    def produced_at(self, value: str) -> int:
        """Return the atom that produces a value; -1 for what every stage has or computes itself."""
        node = self.by_name.get(value)
        return -1 if node is None or node.input_only else self.of_position[self.graph.position[value]]

    def num_bytes(self, value: str) -> int:
        """Return the bytes of a value; 0 for an input-only view of other memory, and for what is not one tensor."""
        node = self.by_name.get(value)
        if node is None:
            return self.input_bytes[value]
        if node.input_only:
            return 0 if node.storage else self.costs[value].output_bytes
        return 0 if node.spec is None else node.spec.num_bytes(self.sizes)

    @functools.cached_property
    def input_bytes(self) -> dict[str, int]:
        """The bytes of the batch's tensors."""
        return {entry.name: entry.spec.num_bytes(self.sizes) for entry in self.graph.inputs}

    def carries_gradient(self, value: str) -> bool:
        """Return whether a gradient flows back through the value."""
        node = self.by_name.get(value)
        return node is not None and not node.input_only and node.spec is not None and node.spec.requires_grad

    def has_trained(self, node: Node) -> bool:
        """Return whether a node has parameters to train."""
        return any(self.graph.parameters[name].requires_grad for name in node.parameters)

    def later_readers(self, value: str, producer: int) -> set[int]:
        """Return the atoms behind ``producer`` that read the value."""
        return {atom for atom in self.reads.get(value, ()) if atom > producer}
