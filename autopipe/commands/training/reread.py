"""Refuse a forward that changes its batch in place, if the data yields the same memory in every epoch.

In plain training, the change remains in the user's data, and the next epoch reads the changed data. Stages work on
copies, and would train on other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from autopipe.bits import same_bits
from autopipe.commands.prepared import Prepared
from autopipe.commands.steps import batch_size_of
from autopipe.errors import RunError
from autopipe.ir.graph import Graph, Node


def changed_inputs(graph: Graph) -> dict[str, Node]:
    """Return the tensors of the batch that the forward changes in place, each with the first call that changes it.

    Capture inserts a clone of such a tensor first. It is recognized by having no line of the user's code.
    """
    inputs = {entry.name for entry in graph.inputs}
    clones = {
        node.name: node.inputs[0]
        for node in graph.nodes
        if node.target == "clone" and not node.source and node.inputs[:1] and node.inputs[0] in inputs
    }
    changed: dict[str, Node] = {}
    for node in graph.nodes:
        for value in node.mutates:
            name = clones.get(value, value)
            if name in inputs:
                changed.setdefault(name, node)
    return changed


def refuse_changed_data(prepared: Prepared) -> None:
    """Change the first minibatch as the forward would, read it again, and refuse data that kept the change.

    Raises: RunError naming the tensor and the line of the forward.
    """
    workload = prepared.workload
    changed = changed_inputs(prepared.graph)
    if not changed or not workload.has_data:
        return
    size = batch_size_of(workload, prepared.plan)

    def read() -> dict[str, Tensor]:
        return workload.leaves(next(workload.items(size)))

    first = read()
    for name, node in changed.items():
        if name in first and _stays(name, first[name], read):
            raise RunError(
                f"the forward changes {name} in place, and data yields the same memory in every epoch: plain training "
                "would read the changed numbers again, but stages work on copies",
                where=node.place,
                remedy=f"work on a copy ({name} = {name}.clone()) before that line, or clone the batch in data",
            )


def _stays(name: str, leaf: Tensor, read: Callable[[], Mapping[str, Tensor]]) -> bool:
    """Return whether a change of a batch's tensor appears in the batch that is read again. The change is undone."""
    before = leaf.detach().clone()
    other = ~before if before.dtype == torch.bool else before + 1
    with torch.no_grad():
        try:
            leaf.copy_(other)
            again = read().get(name)
            return again is not None and same_bits(again, other)
        finally:
            leaf.copy_(before)
