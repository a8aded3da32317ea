"""What the members of a team cannot run: their tensors are parts, and a step or a hook may look at a complete one."""

from __future__ import annotations

from torch import nn

from autopipe.errors import RunError
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.verify.optimizer_probe import Finding, probe_members
from autopipe.workload import Workload
from autopipe.workload.model.shared_memory import overlapping

_ALONE = "or train without --tensor-parallel"


def refusal_of_team(workload: Workload, plan: Plan, graph: Graph, model: nn.Module | None = None) -> RunError | None:
    """Return the error for an optimizer, a hook or parameters that teams would change, or None.

    ``model``: the model, built if None. An optimizer is tried on synthetic gradients (``verify.optimizer_probe``).
    """
    if plan.team == 1:
        return None
    model = workload.build_model() if model is None else model
    dimensions = _cut(graph, model)
    pair = overlapping(model)
    if pair is not None and not dimensions.keys().isdisjoint(pair):
        return RunError(
            f"parameters {pair[0]} and {pair[1]} share memory, and the members of a team cut them apart",
            where=workload.name,
            remedy=f"use one nn.Parameter in both places, which autopipe treats as tied; {_ALONE}",
        )
    changed = [name for name in graph.after_step if name in dimensions]
    if changed:
        return RunError(
            f"after_step changes {changed[0]}, of which every member of a team has a part: the hook would see a tensor "
            "of another shape",
            where=workload.hooks["after_step"].place,
            remedy=f"let the hook change only parameters that are not cut; {_ALONE}",
        )
    finding = probe_members(workload, dimensions, plan.team, model)
    return None if finding is None else _looks_beyond(finding, workload, plan)


def _cut(graph: Graph, model: nn.Module) -> dict[str, int]:
    """Return the dimension along which each parameter is cut: the one whose size is another one in the model."""
    dimensions = {}
    for name, parameter in model.named_parameters():
        local = graph.parameters[name].shape if name in graph.parameters else tuple(parameter.shape)
        for dimension, (own, whole) in enumerate(zip(local, parameter.shape, strict=True)):
            if own != whole:
                dimensions[name] = dimension
    return dimensions


def _looks_beyond(finding: Finding, workload: Workload, plan: Plan) -> RunError:
    return RunError(
        f"the optimizer does not step each element on its own: with the same gradients, its step of a part of "
        f"{finding.parameter} differs from that of the whole (by {finding.error:.1e} of its largest value, in step "
        f"{finding.step} of the probe). Every member of a team of {plan.team} has a part",
        where=workload.stepping.optimizer_place,
        remedy="use an optimizer without norms or factors of a whole tensor, such as SGD, Adam or AdamW (Adafactor, "
        f"LAMB, Muon and Shampoo have them); {_ALONE}",
    )
