"""The looped layouts, without and with replicas: order, bubble, memory, and the start of reductions."""

from dataclasses import replace

import pytest
from pure.schedules.test_registry import finishes_when_every_step_is_a_meeting_of_all_ranks, held_at_most, texts
from support.layouts import dealt, refusable

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import COMPUTE, StageEdges
from autopipe.schedules import Costs, lower, make, simulate, validate


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zero-bubble"])
@pytest.mark.parametrize(("n", "d"), [(1, 2), (2, 2), (3, 2), (2, 3), (4, 1)])
def test_several_stages_run_on_every_group_of_replicas(name, n, d):
    for v in (1, 2, 3):
        for m in range(1, 4 * n * d + 2):
            request = replace(dealt(n, v, m, 3, d=d), first_minibatch=1)
            if name != "gpipe" and refusable(n, v, m, d):
                with pytest.raises(ScheduleError, match=f"{m} microbatches"):
                    make(name, request)
                continue
            schedule = make(name, request)
            validate(schedule)
            lowered = lower(schedule, StageEdges.chain(n * v))
            validate(lowered)
            assert finishes_when_every_step_is_a_meeting_of_all_ranks(lowered)


@pytest.mark.parametrize("name", ["interleaved", "zero-bubble"])
@pytest.mark.parametrize("apart", [False, True])
def test_replicas_run_the_pipeline_without_replicas_on_their_share(name, apart):
    """Pipeline k runs microbatches k, k + d, ... in the order in which one pipeline runs 0, 1, ..."""
    n, v, d, m = 3, 2, 2, 12
    schedule = make(name, dealt(n, v, m, d=d, apart=apart))
    alone = make(name, dealt(n, v, m // d))
    for place in range(n):
        for k, rank in enumerate(schedule.request.stage_ranks[place]):
            ours = [(i.op, i.stage, i.microbatch) for i in schedule.rows[rank] if i.op in COMPUTE]
            theirs = [(i.op, i.stage, i.microbatch * d + k) for i in alone.rows[place] if i.op in COMPUTE]
            assert ours == theirs
    assert schedule.in_flight == alone.in_flight
    uniform = Costs.uniform(n * v)
    assert simulate(schedule, uniform).seconds == simulate(alone, uniform).seconds


def test_gradients_of_a_stage_are_added_while_the_rank_runs_others():
    row = texts(make("interleaved", dealt(2, 2, 8, d=2)), 0)
    assert row[row.index("2R") - 1] == "2B6@0"
    assert row.index("2R") < row.index("0B6@0")
    assert row[-3:] == ["0R", "0S@0", "2S@0"]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaving_divides_the_bubble_by_the_stages_per_rank(n, v):
    for m in (n, 2 * n, 4 * n):
        timeline = simulate(make("interleaved", dealt(n, v, m)), Costs.uniform(n * v))
        ideal = 2 * m * v  # the work of a rank: m microbatches through v stages
        assert (timeline.seconds - ideal) / ideal == pytest.approx((n - 1) / m / v, abs=1e-12)


@pytest.mark.parametrize(("n", "v"), [(2, 2), (3, 2), (4, 3)])
def test_interleaving_needs_more_memory_by_the_factor_of_the_paper(n, v):
    """Megatron-LM: 1 + (p - 1) / (p v) of the p microbatches, each of which is a v-th of a rank's layers."""
    in_flight = held_at_most(make("interleaved", dealt(n, v, 4 * n)))
    assert in_flight[0] == n * v * (1 + (n - 1) / (n * v))
