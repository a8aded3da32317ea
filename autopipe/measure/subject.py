"""``Subject``: one captured model at one microbatch size, and its segments of consecutive nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, fx

from autopipe.ir.graph import Graph, Node
from autopipe.measure.clock import Clock
from autopipe.measure.walk import Values, inputs_of

Progress = Callable[[str, float], None]
"""Called with the current step, as text, and the fraction of the work that is done, 0 .. 1."""


def no_progress(text: str, fraction: float) -> None:
    """Report nothing."""


class Captured(Protocol):
    """The part of a ``Capture`` that is measured; see ``autopipe.trace``."""

    @property
    def graph(self) -> Graph:
        """The graph."""

    @property
    def module(self) -> fx.GraphModule:
        """The same nodes under the same names, over the user's modules."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive nodes."""

    about: tuple[Node, ...]  # the nodes in the graph
    nodes: tuple[fx.Node, ...]  # the same nodes in the module
    inputs: tuple[str, ...]  # values that the nodes read and do not compute
    outputs: tuple[str, ...]  # values that later nodes read

    @property
    def mutates(self) -> bool:
        """Whether a node changes memory in place."""
        return any(node.mutates for node in self.about)

    @property
    def positions(self) -> dict[str, int]:
        """The position of each value: nodes count from 0, inputs are below 0."""
        positions = {name: index - len(self.inputs) for index, name in enumerate(self.inputs)}
        return {**positions, **{node.name: index for index, node in enumerate(self.nodes)}}


@dataclass(frozen=True)
class Subject:
    """One captured model, to be measured at one microbatch size."""

    capture: Captured
    clock: Clock
    size: int  # samples of the microbatch
    batch: Mapping[str, Tensor]  # the tensors of the microbatch, by the names of the graph's inputs

    @property
    def graph(self) -> Graph:
        """The graph of the model."""
        return self.capture.graph

    @property
    def root(self) -> fx.GraphModule:
        """The module that has the parameters and runs the nodes."""
        return self.capture.module

    @functools.cached_property
    def nodes(self) -> dict[str, fx.Node]:
        """The nodes of the module by name."""
        return {node.name: node for node in self.root.graph.nodes}

    def start(self) -> Values:
        """Return a copy of the batch, as the values before the first node."""
        return Values({name: leaf.clone() for name, leaf in self.batch.items()})

    def forget(self, values: Values, position: int) -> None:
        """Drop the values that no node after ``position`` reads."""
        for name in [n for n in values.by_name if self.graph.last_use.get(n, -1) <= position]:
            del values.by_name[name]

    def segment(self, start: int, stop: int) -> Segment:
        """Return the nodes from ``start`` up to ``stop``."""
        about = self.graph.nodes[start:stop]
        nodes = tuple(self.nodes[node.name] for node in about)
        outputs = tuple(node.name for node in about if self.graph.last_use.get(node.name, -1) >= stop)
        return Segment(about, nodes, tuple(inputs_of(nodes)), outputs)

    def whole(self) -> Segment:
        """Return all nodes."""
        about = self.graph.nodes
        nodes = tuple(self.nodes[node.name] for node in about)
        computed = {node.name for node in about}
        outputs = tuple(name for name in self.graph.outputs if name in computed)
        return Segment(about, nodes, tuple(inputs_of(nodes)), outputs)
