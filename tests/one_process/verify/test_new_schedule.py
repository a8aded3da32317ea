"""A new schedule needs one description and one call of `register` to be planned, simulated, trained and verified."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.planning_cases import profile_of, random_graph
from support.schedule_cases import Case, hold

from autopipe.commands.option_values import choices
from autopipe.errors import PlanError
from autopipe.ir.schedule import Op, Schedule, ScheduleSpec
from autopipe.options.table import OPTIONS
from autopipe.planning import PlanOptions, make_plan, uniform_cluster
from autopipe.planning.cost.predict import predict
from autopipe.planning.requests import PlanRequest
from autopipe.planning.search_space import Space
from autopipe.schedules import ScheduleKind, make, register, registry, validate
from autopipe.schedules.kind import check_one_stage_a_rank, line
from autopipe.schedules.rows import flushed, own_microbatches, stages_of


def pairs(spec: ScheduleSpec) -> Schedule:
    """Two forwards, then their two backwards, and so on: a pipeline that drains after every second microbatch."""
    check_one_stage_a_rank("pairs", spec)

    def order(rank: int, minibatch: int) -> list[tuple[Op, int, int]]:
        (stage,) = stages_of(spec, rank)
        share = own_microbatches(spec, stage, rank, minibatch)
        two = [share[first : first + 2] for first in range(0, len(share), 2)]
        return [(op, stage, j) for group in two for op in (Op.FORWARD, Op.BACKWARD) for j in group]

    return flushed("pairs", spec, order, [min(2, spec.num_microbatches)] * spec.num_stages)


PROFILE, CLUSTER = profile_of(random_graph(random.Random(5), 16), random.Random(5)), uniform_cluster(3)
PAIRS = ScheduleKind(
    name="pairs",
    make=pairs,
    description="two microbatches at a time",
    source="this test",
    synchronous=True,
    example=line(2, 4),
    in_flight="all",
    replicas=False,
    tried_by_auto=True,
    min_microbatches=lambda num_stages, depth: 2,
)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Register the schedule for one test."""
    register(PAIRS)
    yield
    del registry._KINDS["pairs"]


def test_a_new_schedule_is_planned_and_simulated() -> None:
    options = PlanOptions(num_ranks=3, batch_size=16, num_microbatches=4, schedule="pairs")
    plan = make_plan(PROFILE, CLUSTER, options)
    assert (plan.schedule, len(plan.stages)) == ("pairs", 3)
    gpipe = make_plan(PROFILE, CLUSTER, PlanOptions(num_ranks=3, batch_size=16, num_microbatches=4, schedule="gpipe"))
    drained, filled = (predict(each, PROFILE, CLUSTER) for each in (plan, gpipe))
    assert drained.step_seconds > filled.step_seconds  # the pipeline drains twice as often
    with pytest.raises(PlanError, match="needs at least 2 microbatches"):
        make_plan(PROFILE, CLUSTER, PlanOptions(num_ranks=3, batch_size=16, num_microbatches=1, schedule="pairs"))
    with pytest.raises(PlanError, match="'pairs' does not support replicated stages"):
        PlanOptions(num_ranks=3, batch_size=16, schedule="pairs", may_replicate=True)


def test_the_command_line_and_auto_know_a_new_schedule() -> None:
    assert "pairs" in choices(OPTIONS["schedule"])
    space = Space.of(PlanRequest(), 2, 16)
    assert "pairs" in {options.schedule for options in space.unreplicated}
    assert "pairs" not in {options.schedule for options in space.replicated}
    assert PlanRequest(schedule="pairs").schedule == "pairs"


def test_a_new_schedule_keeps_the_rules() -> None:
    validate(make("pairs", line(3, 5, 2)))


@pytest.mark.parametrize("replicas", [(1, 1), (1, 1, 1)])
def test_a_new_schedule_trains_as_plain_training_bit_for_bit(replicas: tuple[int, ...], tmp_path: Path) -> None:
    assert hold(Case("pairs", "gpt", replicas, "8"), tmp_path) == "plain"
