"""``Recording``: one capture of the model, cut by a plan. Ranks follow it for all batches of its shape.

A run starts with the recording of its plan. Batches of another shape get their own (``recordings``), and so does
evaluation if it takes another path through the model: other calls, over the same parameters on the same ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopipe.errors import RunError
from autopipe.ir.batch import BatchForm
from autopipe.ir.graph import Graph, Input
from autopipe.ir.messages import MessagePlan, tied
from autopipe.ir.plan import Plan
from autopipe.ir.tensor import TensorSpec
from autopipe.stage import Stage


@dataclass(frozen=True, slots=True)
class Recording:
    """A capture with its plan."""

    # of its folder in the folder of stage files; "" for the recording of the plan
    name: str
    plan: Plan
    graph: Graph
    message_plan: MessagePlan
    # of every value that crosses from stage to stage
    specs: Mapping[str, TensorSpec]
    # computes the divisor of the loss; None: the number of samples
    divisor: Stage | None = None

    @staticmethod
    def of(plan: Plan, graph: Graph, name: str = "", divisor: Stage | None = None) -> Recording:
        """Return the recording of a graph and its plan."""
        specs = {boundary.value: boundary.spec for boundary in plan.boundaries}
        specs.update({tied(tie.parameter): graph.parameters[tie.parameter] for tie in plan.ties})
        return Recording(name, plan, graph, MessagePlan.of(plan, graph), specs, divisor)

    @property
    def carries_gradient(self) -> frozenset[str]:
        """The values through which a gradient flows."""
        return frozenset(value for values in self.message_plan.backward.values() for value in values)

    def sizes(self, leaves: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Return the sizes of a batch by symbol."""
        return {s.name: int(leaves[s.input].shape[s.dimension]) for s in self.graph.symbols if leaves[s.input].dim()}

    def fits(self, leaves: Mapping[str, torch.Tensor], form: BatchForm) -> bool:
        """Return whether a batch has the form and the shapes of this recording."""
        if not self.graph.batch.fits(form) or not _are_kinds(self.graph, leaves):
            return False
        sizes = self.sizes(leaves)
        if not all(symbol.holds(sizes.get(symbol.name, symbol.hint)) for symbol in self.graph.symbols):
            return False
        return all(
            tuple(leaves[entry.name].shape) == entry.spec.concrete(sizes)
            for entry in self.graph.inputs
            if entry.number is None
        )


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A part of a minibatch, ready to run."""

    # the tensors of the batch, by name
    leaves: Mapping[str, torch.Tensor]
    # the share of the minibatch loss
    factor: float
    # the sizes of the symbols of the graph
    sizes: Mapping[str, int]
    # the capture that the microbatch follows
    recording: Recording


def _are_kinds(graph: Graph, leaves: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the batch has the tensors that a graph reads, with the same dtypes and numbers of dimensions."""
    return all(
        entry.number is not None or (entry.name in leaves and _is_kind(entry, leaves[entry.name]))
        for entry in graph.inputs
    )


def _is_kind(entry: Input, leaf: torch.Tensor) -> bool:
    return leaf.dim() == len(entry.spec.shape) and str(leaf.dtype) == f"torch.{entry.spec.dtype}"


def refuse_other_kinds(graph: Graph, leaves: Mapping[str, torch.Tensor]) -> None:
    """Refuse a tensor of another dtype or number of dimensions than the graph was captured with.

    Raises: RunError naming the tensor and both.
    """
    for entry in graph.inputs:
        leaf = leaves.get(entry.name)
        if leaf is not None and not _is_kind(entry, leaf):
            raise RunError(
                f"{entry.name} is {str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}; "
                f"the model was captured with {entry.spec}",
                remedy="give every batch the dtypes and the number of dimensions of the first one",
            )
