"""What a stage of a finished plan keeps, counted node by node: nothing of the search's tables is used.

The terms are those of ``memory``. What follows the schedule (``cost.peaks``) knows more about a backward, and has
in place of the workspace X, where g are the gradients that wait while a node's backward runs, of values made before
the node and read behind it::

    X' = max(0, max_x (w_x + g_x - A behind x))
    Y  = max(0, max_x (w_x + g_x - H up to x))               the backward is split: its first half frees nothing
    Z  = max(0, max_x (w_x + g_x + G behind x - A behind x)) a minibatch's first backward makes the weights' gradients
    Q  = buffers that the forward writes and reads           kept with each microbatch in flight where it is recomputed
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph, Node
from autopipe.ir.profile import Measurement, NodeCost
from autopipe.planning.cost.ownership import State


@dataclass(frozen=True, slots=True)
class StageTerms:
    """The terms of the formulas for one stage, in bytes. ``stepped``: of the parameters that it steps itself.

    ``workspace``: X. ``workspace_whole``, ``workspace_half``, ``workspace_first``: X', Y and Z. ``replayed``: Q, which
    ``peak`` leaves out.
    """

    weights: int
    gradients: int
    optimizer: int
    stepped: int
    saved: int
    kept: int
    between: int
    workspace: int
    workspace_whole: int
    workspace_half: int
    workspace_first: int
    replayed: int

    def peak(self, in_flight: int, versions: int, recompute: bool, waiting: int = 0) -> int:
        """Return the peak with ``in_flight`` microbatches in flight; ``waiting``: halves of a backward."""
        state = versions * self.weights + self.gradients + self.optimizer
        return (
            state
            + in_flight * self.kept
            + (1 if recompute else in_flight) * self.saved
            + self.workspace
            + waiting * self.between
        )


def recompute_stage_bytes(
    graph: Graph,
    cuts: Cuts,
    measurement: Measurement,
    *,
    optimizer_bytes_per_byte: float,
    edges: Sequence[int],
    state: Sequence[State],
) -> list[StageTerms]:
    """Count the stages of the plan with these edges. ``state``: (parameters, buffers) of each."""
    count = _Bytes.of_graph(graph, cuts, measurement)
    terms, stepped = [], set[str]()
    for (start, stop), (parameters, buffers) in zip(itertools.pairwise(edges), state, strict=True):
        nodes = cuts.stage_nodes(start, stop, graph.outputs if stop == len(graph.nodes) else ())
        trained = {name: count.parameter(name) for name in parameters if graph.parameters[name].requires_grad}
        own = sum(size for name, size in trained.items() if name not in stepped)
        stepped.update(parameters)
        weights = sum(map(count.parameter, parameters))
        weights += sum(graph.buffers[name].num_bytes(count.sizes) for name in buffers)
        work = [node for node in nodes if not node.input_only]
        replayed = {name for node in nodes for name in node.buffers_written if name in graph.replayed_buffers}
        between = sum(count.costs[node.name].output_bytes for node in work if trained.keys() & set(node.parameters))
        terms.append(
            StageTerms(
                weights,
                sum(trained.values()),
                math.ceil(optimizer_bytes_per_byte * own),
                own,
                *_saved_and_kept(count, nodes, start, stop),
                between,
                *_workspaces(count, work, trained, between),
                sum(graph.buffers[name].num_bytes(count.sizes) for name in replayed),
            )
        )
    return terms


def _saved_and_kept(count: _Bytes, nodes: Sequence[Node], start: int, stop: int) -> tuple[int, int]:
    """Return A and K of a stage."""
    read = dict.fromkeys(value for node in nodes for value in node.inputs)
    if stop == len(count.graph.nodes):
        read.update(dict.fromkeys(count.graph.outputs))
    kept = sum(count.of(v) for v in read if count.comes_from_elsewhere(v, start) and not count.copied(v))
    copied = [node.name for node in nodes if node.input_only]
    kept += sum(map(count.of, copied))
    saved = sum(count.costs[node.name].saved_bytes for node in nodes if not node.input_only)
    return max(saved + _corrections(count, start, stop, dict.fromkeys([*read, *copied])), 0), kept


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Looks up values by name: batch tensors, input-only results (a view of another's memory is 0), other results.

    ``kept_at``: memory -> the first node that keeps it, by position.
    """

    graph: Graph
    cuts: Cuts
    sizes: Mapping[str, int]
    costs: Mapping[str, NodeCost]
    inputs: Mapping[str, int]
    kept_at: Mapping[str, int]

    @staticmethod
    def of_graph(graph: Graph, cuts: Cuts, measurement: Measurement) -> _Bytes:
        sizes = graph.sizes(measurement.microbatch_size)
        kept_at: dict[str, int] = {}
        for value, keeper in measurement.keepers.items():
            memory, at = cuts.storage(value), graph.position[keeper]
            kept_at[memory] = min(at, kept_at.get(memory, at))
        inputs = {entry.name: entry.spec.num_bytes(sizes) for entry in graph.inputs}
        return _Bytes(graph, cuts, sizes, measurement.costs, inputs, kept_at)

    def parameter(self, name: str) -> int:
        return self.graph.parameters[name].num_bytes(self.sizes)

    def node(self, value: str) -> Node | None:
        at = self.graph.position.get(value)
        return None if at is None else self.graph.nodes[at]

    def of(self, value: str) -> int:
        node = self.node(value)
        if node is None:
            return self.inputs[value]
        if node.input_only:
            return 0 if node.storage else self.costs[value].output_bytes
        return 0 if node.spec is None else node.spec.num_bytes(self.sizes)

    def copied(self, value: str) -> bool:
        """Whether every stage that reads the value computes it."""
        node = self.node(value)
        return node is not None and node.input_only

    def comes_from_elsewhere(self, value: str, start: int) -> bool:
        return self.node(value) is None or self.copied(value) or self.graph.position[value] < start

    def carries_gradient(self, value: str) -> bool:
        node = self.node(value)
        return node is not None and not node.input_only and node.spec is not None and node.spec.requires_grad


def _corrections(count: _Bytes, start: int, stop: int, has: Iterable[str]) -> int:
    """Return what to add to what the nodes of a stage save, where the cuts are as they are; see ``tables``.

    ``has``: all that the stage reads, or computes from its inputs alone. Memory under several names counts once.
    """
    graph, storage, total = count.graph, count.cuts.storage, 0
    for memory in {storage(value) for value in has if count.comes_from_elsewhere(value, start)}:
        if start <= count.kept_at.get(memory, -1) < stop and count.comes_from_elsewhere(memory, start):
            total -= count.of(memory)
    names = [node.name for node in graph.nodes[start:stop]] if stop < len(graph.nodes) else []
    sent = [name for name in names if graph.last_use.get(name, -1) >= stop and count.carries_gradient(name)]
    for memory in {storage(value) for value in sent}:
        if count.kept_at.get(memory, stop) >= stop and not count.comes_from_elsewhere(memory, start):
            total += count.of(memory)
    return total


def _workspaces(
    count: _Bytes, work: Sequence[Node], trained: Mapping[str, int], between: int
) -> tuple[int, int, int, int]:
    """Return X, X', Y and Z of a stage."""
    costs, waiting = count.costs, _waiting_gradients(count, work)
    plain = whole = half = first = 0
    behind, noted, new_gradients, left = 0, between, 0, dict(trained)
    for node in reversed(work):
        own = costs[node.name].workspace_bytes
        most = own + waiting[node.name]
        plain, whole = max(plain, own - behind), max(whole, most - behind)
        half, first = max(half, most - noted), max(first, most + new_gradients - behind)
        behind += costs[node.name].saved_bytes
        noted -= costs[node.name].output_bytes if trained.keys() & set(node.parameters) else 0
        new_gradients += sum(
            left.pop(name, 0) for name in node.parameters
        )  # a parameter of several nodes has one gradient
    return plain, whole, half, first


def _waiting_gradients(count: _Bytes, work: Sequence[Node]) -> dict[str, int]:
    """Return g for each node. A gradient that another stage sent is a message, and not among them."""
    first = {node.name: place for place, node in enumerate(work)}
    last = {value: place for place, node in enumerate(work) for value in node.inputs}
    change = [0] * (len(work) + 1)
    for value, end in last.items():
        if count.carries_gradient(value) and end > first.get(value, -1) + 1:
            change[first.get(value, -1) + 1] += count.of(value)
            change[end] -= count.of(value)
    return dict(zip(first, itertools.accumulate(change), strict=False))
