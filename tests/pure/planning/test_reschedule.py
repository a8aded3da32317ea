"""A plan under another schedule: the same stages, its options, and the flags that choose it."""

import dataclasses
import math
from pathlib import Path

import pytest
from support.planning_cases import chain, machine

from autopipe.commands.planning.simulating import schedule_flags, with_schedule
from autopipe.errors import PlanError
from autopipe.planning import PlanOptions, make_plan
from autopipe.planning.cost import predict
from autopipe.planning.requests import PlanRequest

GRID = "F0,F1,B0,B1\nF0,B0,F1,B1\n"
PROFILE, FAST = chain(8, saved=2**20, weight=2**20, output=2**20), machine(4, 100)


@pytest.mark.parametrize(
    ("request_", "ranks", "note"),
    [
        (PlanRequest(schedule="gpipe"), 4, "gpipe, the same stages"),
        (PlanRequest(schedule="interleaved", stages_per_rank=2), 2, "stages_per_rank 2, the same stages on 2 ranks"),
        (PlanRequest(schedule="pipedream", vertical_sync=True), 4, "pipedream, vertical_sync 1, the same stages"),
        (PlanRequest(schedule="custom", grid="0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n"), 2, "custom"),
    ],
)
def test_a_plan_is_simulated_under_another_schedule(request_, ranks, note):
    planned = make_plan(PROFILE, FAST, PlanOptions(num_ranks=4, batch_size=32, num_microbatches=1))
    other, (message,) = with_schedule(planned, request_)
    assert other.num_ranks == ranks and note in message
    assert math.isfinite(predict.predict(other, PROFILE, FAST).step_seconds)
    assert with_schedule(planned, PlanRequest()) == (planned, ())


def test_equal_replicas_are_kept_when_stages_are_dealt_out_again():
    options = PlanOptions(num_ranks=8, batch_size=32, num_microbatches=8, schedule="zero-bubble", replicas=2)
    planned = make_plan(PROFILE, machine(8, 100), options)
    other, _ = with_schedule(planned, PlanRequest(schedule="interleaved", stages_per_rank=2))
    assert other.stage_ranks == ((0, 1), (2, 3)) * 2
    assert math.isfinite(predict.predict(other, PROFILE, FAST).step_seconds)


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (
            PlanRequest(schedule="interleaved", stages_per_rank=3),
            "the 4 stages of the plan cannot be distributed with 3 on each rank",
        ),
        (PlanRequest(schedule="custom", grid=GRID), "has 2 stages and 2 microbatches, but the plan has 4 and 1"),
        (PlanRequest(schedule="custom"), "--schedule custom needs a schedule file"),
    ],
)
def test_a_plan_that_the_requested_schedule_cannot_run_is_refused(request_, what):
    with pytest.raises(PlanError, match=what):
        with_schedule(make_plan(PROFILE, FAST, PlanOptions(num_ranks=4, batch_size=32, num_microbatches=1)), request_)


def test_flags_of_a_schedule_choose_it_again():
    plan = make_plan(PROFILE, FAST, PlanOptions(num_ranks=4, batch_size=32, num_microbatches=8))
    late = dataclasses.replace(plan, schedule="pipedream", schedule_options={"depth": 2, "vertical_sync": 1})
    assert schedule_flags(plan, None) == "--schedule 1f1b"
    assert schedule_flags(late, None) == "--schedule pipedream --warmup-depth 2 --vertical-sync"
    assert schedule_flags(plan, Path("my grid.csv")) == "--schedule-file 'my grid.csv'"


def test_options_of_the_schedule_are_kept_if_it_is_simulated_again():
    plan = make_plan(PROFILE, FAST, PlanOptions(num_ranks=4, batch_size=32, num_microbatches=8))
    plan = dataclasses.replace(plan, schedule="pipedream", schedule_options={"depth": 2, "vertical_sync": 1})
    other, (note,) = with_schedule(plan, PlanRequest(warmup_depth=3))
    assert other.schedule_options == {"depth": 3, "vertical_sync": 1}
    assert note == "the plan is for pipedream; simulated with pipedream, depth 3, vertical_sync 1, the same stages"
    other, _ = with_schedule(plan, PlanRequest(warmup_depth=3, vertical_sync=False))
    assert other.schedule_options == {"depth": 3}
