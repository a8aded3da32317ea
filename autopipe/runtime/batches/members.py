"""Further recordings of a model that runs in teams: members cut the same tensors, in the same way, as in the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from autopipe.errors import PlanError
from autopipe.generate.loader import load_stage
from autopipe.ir.plan import Plan
from autopipe.ir.teams.axes import Axis
from autopipe.ir.teams.axis_sets import choose
from autopipe.trace import Capture
from autopipe.trace.axes import find_axes, verified
from autopipe.trace.teams import difference, member_of
from autopipe.trace.teams.arguments import along


class Batches(Protocol):
    """The part of a workload that gives the batch of a capture."""

    def example_item(self, batch_size: int, /) -> Any:
        """Return the batch, with this number of samples."""

    def leaves(self, item: Any, /) -> dict[str, Tensor]:
        """Return the tensors of a batch by input."""


def of_same_team(captured: Capture, plan: Plan, stages: Path, batches: Batches) -> Capture:
    """Return the capture of a member, for a capture of the complete model on another batch; without teams, itself.

    ``stages``: the stage files of the plan. ``batches``: of the capture, on one of which the axes are verified.

    Raises: PlanError if members would have other parts of the tensors than in the plan.
    """
    if plan.team == 1:
        return captured
    codes = [
        load_stage(stages, stage.index, graph_digest=plan.graph_digest, plan_digest=plan.digest)
        for stage in plan.stages
    ]
    shards = {name: place for code in codes for name, place in code.SHARDS.items()}
    partial = {name for code in codes for name in code.PARTIAL}

    def is_of_plan(axis: Axis) -> bool:
        return all(shards.get(place.name) == along(place, axis.size) for place in axis.parameters)

    axes = choose(captured.graph, [axis for axis in find_axes(captured).axes if is_of_plan(axis)], plan.team)
    member = member_of(captured, axes, plan.team, sequence=plan.workload.sequence)
    read = {name for node in captured.graph.nodes for name in (*node.parameters, *node.buffers)}
    other = (shards.keys() ^ member.shards.keys()) & read or (partial ^ {*member.partial}) & read
    samples = captured.graph.samples
    count = plan.microbatch_size if samples is None else samples.hint + 1
    leaves = batches.leaves(batches.example_item(count))
    why = f"its calls cut {min(other)} in another way than the stages do" if other else ""
    if not why:
        why = "; ".join(verified(captured, axes, leaves, plan.team).notes)
    if not why and plan.workload.sequence:
        why = difference(captured, member, axes, leaves)
    if why:
        raise PlanError(
            f"with --tensor-parallel {plan.team}, {why}",
            remedy="pad the batches to one shape, or train without --tensor-parallel",
        )
    return member
