"""A rank builds the row of a window once: later windows are the same row, with other minibatches and versions."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from autopipe.ir.schedule import Instruction, ScheduleSpec, StageEdges
from autopipe.runtime.program import Step
from autopipe.runtime.rows import RankRows
from autopipe.schedules import REGISTRY, lower, make, turns

STRAIGHT = {kind.name: kind.example for kind in REGISTRY.values() if not kind.spills and kind.name != "custom"}
WITH_REPLICAS = {
    name: ScheduleSpec(((0, 1), (2,), (3, 4, 5)), 9, options=dict(spec.options))
    for name, spec in STRAIGHT.items()
    if REGISTRY[name].replicas and not REGISTRY[name].equal_replicas
}
CASES = {**STRAIGHT, **{f"{name} with replicas": spec for name, spec in WITH_REPLICAS.items()}}


def context_of(name: str, request: ScheduleSpec) -> Any:
    """Return what the rows read of a run of a chain of stages."""
    stages = [SimpleNamespace(replicas=len(ranks)) for ranks in request.stage_ranks]
    edges = StageEdges.chain(request.num_stages)
    request = dataclasses.replace(request, num_minibatches=1)
    plan = SimpleNamespace(schedule=name, stages=stages)
    return SimpleNamespace(plan=plan, request=request, message_plan=SimpleNamespace(edges=edges))


def shifted(instruction: Instruction, offset: int, request: ScheduleSpec) -> Instruction:
    """Return the instruction that the executor runs for one of a row."""
    return Step.of(SimpleNamespace(instruction=instruction, posts=()), request, 0, {}, frozenset()).at(offset)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_a_shifted_row_is_the_row_of_the_later_window(case: str) -> None:
    request, name = CASES[case], case.removesuffix(" with replicas")
    context = context_of(name, request)
    built = {}
    for rank in range(request.num_ranks):
        rows = RankRows(context, rank)
        for first in range(20):
            row, offset = rows.of_window(first, 3)
            built[id(row)] = row
            window = dataclasses.replace(context.request, first_minibatch=first, num_minibatches=3)
            expected = turns(lower(make(name, window), context.message_plan.edges), rank)
            assert [shifted(turn.instruction, offset, window) for turn in row] == [t.instruction for t in expected]
            posts = [tuple(shifted(post, offset, window) for post in turn.posts) for turn in row]
            assert posts == [turn.posts for turn in expected]
    assert len(built) < 20 * request.num_ranks
