"""Which parameters of other stages a stage needs so that ``after_step`` gives its own the values of one process.

The new value of a parameter may depend on others (a momentum teacher's on its student's). Where they lie in another
stage, their values after the optimizer's step are lent: the stage runs the hook over its own parameters and these, and
drops what the hook made of the lent ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Loan:
    """``parameter``, which stage ``owner`` steps, is lent to stage ``reader`` after each step."""

    parameter: str
    owner: int
    reader: int


def owners(plan: Plan) -> dict[str, int]:
    """Return the stage that steps each parameter: of a tied one the first."""
    owners: dict[str, int] = {}
    for stage in plan.stages:
        for name in stage.parameters:
            owners.setdefault(name, stage.index)
    return owners


def borrowed(plan: Plan, graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return, for each parameter that the hook changes, those of other stages that its new value depends on."""
    owner = owners(plan)
    return {
        name: tuple(other for other in read if owner[other] != owner[name]) for name, read in graph.after_step.items()
    }


def loans(plan: Plan, graph: Graph) -> tuple[Loan, ...]:
    """Return every loan of a plan, by reader, in the order of the model's parameters: the same on every rank."""
    owner = owners(plan)
    wanted = {(owner[name], other) for name, others in borrowed(plan, graph).items() for other in others}
    return tuple(
        Loan(name, owner[name], stage.index)
        for stage in plan.stages
        for name in graph.parameters
        if (stage.index, name) in wanted
    )
