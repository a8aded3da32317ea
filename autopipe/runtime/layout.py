"""``Layout``: what plan and graph say about a run, the same on every rank; and a minibatch cut for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopipe.errors import PlanError, RunError
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Request
from autopipe.runtime.executor import Microbatch
from autopipe.runtime.routes import Routes, channels
from autopipe.runtime.transport import Channel
from autopipe.schedules import make
from autopipe.workload import Workload


@dataclass(frozen=True, slots=True)
class Layout:
    """What plan and graph say about a run, the same on every rank."""

    plan: Plan
    graph: Graph
    request: Request
    routes: Routes
    channels: tuple[Channel, ...]
    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(plan: Plan, graph: Graph) -> Layout:
        """Read it off the two. A frozen tied parameter exchanges nothing: its copies never change."""
        ties = tuple(tie for tie in plan.ties if graph.parameters[tie.parameter].requires_grad)
        plan = replace(plan, ties=ties)
        request = Request(plan.stage_ranks, plan.num_microbatches, options=dict(plan.schedule_options))
        refuse_stale_ties(plan, request)
        routes = Routes.of(plan)
        groups = tuple(sorted({ranks for ranks in plan.stage_ranks if len(ranks) > 1}))
        return Layout(plan, graph, request, routes, tuple(channels(routes, request)), groups)

    @property
    def weighted(self) -> bool:
        """Whether the user's loss brings its own weight."""
        return len(self.graph.outputs) > 1


def refuse_stale_ties(plan: Plan, request: Request) -> None:
    """Refuse a schedule under which the stages of a tied parameter would read different versions of it.

    Raises: PlanError naming the parameter and the versions.
    """
    staleness = make(plan.schedule, request).staleness
    for tie in plan.ties:
        stages = (tie.owner, *tie.copies)
        found = {stage: staleness[stage] for stage in stages}
        if len(set(found.values())) > 1:
            versions = ", ".join(f"stage {stage} reads version t - {delta}" for stage, delta in found.items())
            raise PlanError(
                f"{plan.schedule} cannot keep {tie.parameter} tied: in minibatch t {versions}",
                remedy="choose 1f1b or 2bw, or pipedream --vertical-sync: there all stages read one version",
            )


def check_shapes(graph: Graph, leaves: Mapping[str, torch.Tensor]) -> None:
    """Refuse a batch that is not of the shapes that were captured: only the sizes with a symbol may differ.

    Raises: RunError naming the tensor and both shapes.
    """
    missing = [entry.name for entry in graph.inputs if entry.name not in leaves]
    if missing:
        raise RunError(
            f"the batch lacks {missing[0]!r}; it has {', '.join(leaves)}",
            remedy="let every batch have the entries of the first one",
        )
    sizes = {s.name: int(leaves[s.input].shape[s.dimension]) for s in graph.symbols if leaves[s.input].dim()}
    for entry in graph.inputs:
        leaf = leaves[entry.name]
        if tuple(leaf.shape) != entry.spec.concrete(sizes) or str(leaf.dtype) != f"torch.{entry.spec.dtype}":
            raise RunError(
                f"{entry.name} is {str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}; "
                f"the model was captured with {entry.spec}",
                remedy="pad batches to one shape: only the number of samples may differ from batch to batch for now",
            )


def microbatches(workload: Workload, graph: Graph, item: Any, count: int, device: torch.device) -> list[Microbatch]:
    """Cut a minibatch. The factor n_j / n is each part's share of the samples."""
    parts = workload.split(item, count)
    total = sum(workload.num_samples(part) for part in parts)
    found = []
    for part in parts:
        leaves = workload.leaves(part)
        check_shapes(graph, leaves)
        sizes = {s.name: int(leaves[s.input].shape[s.dimension]) for s in graph.symbols}
        on_device = {name: leaf.to(device, non_blocking=True) for name, leaf in leaves.items()}
        found.append(Microbatch(on_device, workload.num_samples(part) / total, sizes))
    return found
