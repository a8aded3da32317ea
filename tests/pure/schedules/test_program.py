"""The seconds of a program are those of the simulated timeline, and the bound is never above them."""

import dataclasses
import random

import pytest

from autopipe.ir.schedule import ScheduleSpec, StageEdges
from autopipe.schedules import Costs, EdgeCosts, Program, StageCosts, least_seconds, lower, make, simulate


def _seconds(rng):
    return rng.choice((0.0, rng.random()))


def _costs(rng, count):
    stages = tuple(
        StageCosts(*(_seconds(rng) for _ in range(6)), reduce_buckets=rng.randint(1, 4)) for _ in range(count)
    )
    edges = {
        (a, b): EdgeCosts(*(_seconds(rng) for _ in range(4))) for a in range(count) for b in range(count) if a != b
    }
    return Costs(stages, edges)


def _edges(rng, count):
    return [(a, b) for a in range(count) for b in range(a + 1, count) if b == a + 1 or rng.random() < 0.2]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "eager-1f1b", "pipedream", "2bw", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("seed", range(12))
def test_a_program_takes_as_long_as_the_timeline(name, seed):
    rng = random.Random(seed)
    count, options = rng.randint(1, 4), {}
    replicas = [1 if name in ("interleaved", "zero-bubble") else rng.randint(1, 3) for _ in range(count)]
    first = [sum(replicas[:stage]) for stage in range(count)]
    ranks = tuple(tuple(range(a, a + r)) for a, r in zip(first, replicas, strict=True))
    if name == "interleaved":
        ranks, options = ranks * 2, {"stages_per_rank": 2}
    microbatches = count * rng.randint(1, 3) * (2 if name == "2bw" else 1)
    schedule = make(name, ScheduleSpec(ranks, max(microbatches, *replicas), rng.choice((1, 3)), options=options))
    forward = _edges(rng, len(ranks))
    lowered = lower(schedule, StageEdges(tuple(forward), tuple((b, a) for a, b in forward)))
    program = Program(lowered)
    for cores in (0.0, 1.5):
        costs = dataclasses.replace(_costs(rng, len(ranks)), cores=cores)
        timeline, totals = simulate(lowered, costs), program.run(costs)
        assert totals.seconds == timeline.seconds
        assert totals.bubble_fraction == timeline.bubble_fraction
        assert totals.busy_seconds == tuple(timeline.busy_seconds(rank) for rank in range(timeline.num_ranks))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "eager-1f1b"])
@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_is_faster_than_the_bound(name, seed):
    rng = random.Random(seed)
    count, microbatches = rng.randint(1, 6), rng.randint(1, 10)
    forward = _edges(rng, count)
    backward = [(b, a) for a, b in forward if rng.random() < 0.9]
    costs = _costs(rng, count)
    schedule = make(name, ScheduleSpec(tuple((stage,) for stage in range(count)), microbatches))
    seconds = simulate(lower(schedule, StageEdges(tuple(forward), tuple(backward))), costs).seconds
    assert 0 <= least_seconds(costs, microbatches, forward, backward) <= seconds


def test_the_bound_is_the_time_of_equal_stages():
    chain = StageEdges.chain(4)
    costs = Costs.uniform(4)
    assert least_seconds(costs, 8, chain.forward, chain.backward) == pytest.approx((8 + 3) * 2)
