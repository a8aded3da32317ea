"""The bytes of a stage that only its schedule shows: what a backward takes at its worst node.

The search charges a stage for the workspace X of ``memory``. ``peaks``, which follows the schedule, replaces it. g are
the gradients that wait while the backward of a node runs, of values produced before the node and read behind it::

    X' = max(0, max_x (w_x + g_x - A behind x))
    Y  = max(0, max_x (w_x + g_x - H up to x))               the backward is split: its first half frees nothing
    Z  = max(0, max_x (w_x + g_x + G behind x - A behind x)) a minibatch's first backward creates the weights' gradients
    Q  = buffers that the forward writes and reads           kept with each microbatch in flight if it is recomputed

With recompute by block, A is what nodes outside of units save, and the unit of x adds what it saves up to x (``inside``
of ``block_sums``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopipe.ir.graph import Node
from autopipe.planning.cost.atoms import Atoms


@dataclass(frozen=True, slots=True)
class BackwardBytes:
    """The bytes of one stage, per microbatch."""

    whole: int  # X'
    half: int  # Y
    first: int  # Z
    replayed: int  # Q


def backward_bytes(
    atoms: Atoms, starts: Sequence[int], units: Sequence[Sequence[tuple[int, int]]], inside: Mapping[str, int]
) -> list[BackwardBytes]:
    """Return the bytes of the stages of a plan that start at these node positions.

    ``units``: of each stage, the ranges of nodes that are recomputed by block; ``inside``: by node, the bytes that it
    saves in its unit.
    """
    graph = atoms.graph
    stages = []
    edges = itertools.pairwise((*starts, len(graph.nodes)))
    for (start, stop), of_stage in zip(edges, units, strict=True):
        nodes = atoms.cuts.stage_nodes(start, stop, graph.outputs if stop == len(graph.nodes) else ())
        replayed = {name for node in nodes for name in node.buffers_written if name in graph.replayed_buffers}
        buffer_bytes = sum(graph.buffers[name].num_bytes(atoms.sizes) for name in replayed)
        work = [node for node in nodes if not node.input_only]
        stages.append(BackwardBytes(*_workspaces(atoms, work, of_stage, inside), replayed=buffer_bytes))
    return stages


def _workspaces(
    atoms: Atoms, work: Sequence[Node], units: Sequence[tuple[int, int]], inside: Mapping[str, int]
) -> tuple[int, int, int]:
    """Return X', Y and Z of the stage that runs these nodes."""
    again = _recomputed(atoms, work, units, inside)
    costs, waiting = atoms.costs, _waiting_gradients(atoms, work)
    between_up_to = sum(costs[node.name].output_bytes for node in work if atoms.has_trained(node))
    whole = half = first = 0
    saved_behind = gradients_behind = 0
    counted = set[str]()
    for node in reversed(work):
        most = costs[node.name].workspace_bytes + waiting[node.name] + again.get(node.name, 0)
        whole = max(whole, most - saved_behind)
        half = max(half, most - between_up_to)
        first = max(first, most + gradients_behind - saved_behind)
        saved_behind += 0 if node.name in again else costs[node.name].saved_bytes
        between_up_to -= costs[node.name].output_bytes if atoms.has_trained(node) else 0
        for name in node.parameters:  # a parameter of several nodes has one gradient
            spec = atoms.graph.parameters[name]
            gradients_behind += spec.num_bytes(atoms.sizes) if spec.requires_grad and name not in counted else 0
            counted.add(name)
    return whole, half, first


def _recomputed(
    atoms: Atoms, work: Sequence[Node], units: Sequence[tuple[int, int]], inside: Mapping[str, int]
) -> dict[str, int]:
    """Return, for the nodes in units, what their unit saves up to them."""
    again: dict[str, int] = {}
    for start, stop in units:
        saved = 0
        for node in work:
            if start <= atoms.graph.position[node.name] < stop:
                saved += inside[node.name]
                again[node.name] = saved
    return again


def _waiting_gradients(atoms: Atoms, work: Sequence[Node]) -> dict[str, int]:
    """Return g of each node. A gradient that another stage sent is a message, and not included."""
    first = {node.name: place for place, node in enumerate(work)}
    last = {value: place for place, node in enumerate(work) for value in node.inputs}
    change = [0] * (len(work) + 1)
    for value, end in last.items():
        if atoms.carries_gradient(value) and end > first.get(value, -1) + 1:
            change[first.get(value, -1) + 1] += atoms.num_bytes(value)
            change[end] -= atoms.num_bytes(value)
    return dict(zip(first, itertools.accumulate(change), strict=False))
