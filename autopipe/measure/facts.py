"""``NodeFacts``: the results of one walk over the nodes, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopipe.ir.graph import Node
from autopipe.ir.profile import NodeWork
from autopipe.measure.piece import tensors_of
from autopipe.measure.subject import Progress, Subject
from autopipe.measure.walk import NodeTimer, explained


@dataclass
class NodeFacts:
    """The results of one walk, by name of the node."""

    signatures: dict[str, Any] = field(default_factory=dict)  # equal for nodes that cost the same
    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)  # rough forward and backward
    output_bytes: dict[str, int] = field(default_factory=dict)
    workspace_bytes: dict[str, int] = field(default_factory=dict)
    work: dict[str, NodeWork] = field(default_factory=dict)  # of the nodes that compute or move anything
    replaced: dict[int, torch.dtype] = field(default_factory=dict)  # id of each parameter that a cast replaces -> dtype
    casts: dict[str, int] = field(default_factory=dict)  # name of each such parameter -> bytes of its cast

    def shares(self, nodes: Sequence[Node]) -> tuple[list[float], list[float]]:
        """Return the share of each node in the forward and in the backward of all of them."""
        forward = _normalised([self.seconds[node.name][0] for node in nodes])
        return forward, _normalised([self.seconds[node.name][1] for node in nodes])


def walk_nodes(subject: Subject, progress: Progress) -> NodeFacts:
    """Run every node once on its own, with rough times.

    Raises: ProfileError for a node that fails.
    """
    names = {id(p): name for name, p in subject.root.named_parameters() if name in subject.graph.cast_once}
    facts, values, timer = NodeFacts(), subject.start(), NodeTimer(subject.clock, frozenset(names))
    timer.calibrate()
    count = len(subject.graph.nodes)
    for index, node in enumerate(subject.graph.nodes):
        progress(f"node {node.name}", 0.1 * index / count)
        with explained(node, subject.size):
            signature, forward, backward = timer.step(subject.nodes[node.name], node, values, subject.root)
        facts.signatures[node.name], facts.seconds[node.name] = signature, (forward, backward)
        facts.workspace_bytes[node.name] = timer.workspace[signature]
        if timer.work[signature] != NodeWork():
            facts.work[node.name] = timer.work[signature]
        tensors = tensors_of(values.by_name[node.name])
        facts.output_bytes[node.name] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        subject.forget(values, index)
    facts.replaced = timer.replaced
    parameters = subject.graph.parameters
    facts.casts = {
        names[key]: parameters[names[key]].num_bytes({}) // 4 * dtype.itemsize for key, dtype in timer.replaced.items()
    }
    return facts


def _normalised(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights] if total else [1 / len(weights)] * len(weights)
