"""Loans: the parameters of other stages that a stage needs to run the ``after_step`` hook.

The new value of a parameter may depend on others: a momentum teacher's depends on its student's. If those are in
another stage, their values after the optimizer's step are sent to the stage. It runs the hook over its own parameters
and these loans, and discards the changes to the loans. So its own parameters get the same values as in one process.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Loan:
    """A parameter that stage ``owner`` steps, and sends to stage ``reader`` after each step."""

    parameter: str
    owner: int
    reader: int


def owners(plan: Plan) -> dict[str, int]:
    """Return the stage that steps each parameter: for a tied one, the first of its stages."""
    owners: dict[str, int] = {}
    for stage in plan.stages:
        for name in stage.parameters:
            owners.setdefault(name, stage.index)
    return owners


def borrowed(plan: Plan, graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return, for each parameter that the hook changes, the ones of other stages that its new value depends on."""
    owner = owners(plan)
    return {
        name: tuple(other for other in read if owner[other] != owner[name]) for name, read in graph.after_step.items()
    }


def loans(plan: Plan, graph: Graph) -> tuple[Loan, ...]:
    """Return all loans of a plan, sorted by reader and by the order of the model's parameters: equal on every rank."""
    owner = owners(plan)
    wanted = {(owner[name], other) for name, others in borrowed(plan, graph).items() for other in others}
    return tuple(
        Loan(name, owner[name], stage.index)
        for stage in plan.stages
        for name in graph.parameters
        if (stage.index, name) in wanted
    )
