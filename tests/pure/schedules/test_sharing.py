"""Ranks that share cores: between the time with a core for each and the time of one after the other."""

import dataclasses

import pytest

from autopipe.ir.schedule import ScheduleSpec
from autopipe.schedules import Costs, make, simulate
from autopipe.schedules.simulate import shared_clock


def test_ranks_without_a_core_take_turns():
    at = shared_clock([(0.0, 4.0), (1.0, 3.0), (1.0, 2.0)], 2.0)
    # three ranks on two cores from 1 to 2: that second takes 1.5
    assert [at(time) for time in (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 5.0)] == [0.0, 0.5, 1.0, 1.75, 2.5, 4.5, 5.5]


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("cores", [1, 2, 3, 4, 8])
def test_a_step_is_as_long_as_the_cores_allow(name, cores):
    schedule = make(name, ScheduleSpec(tuple((stage,) for stage in range(4)), 8))
    alone = simulate(schedule, Costs.uniform(4))
    shared = simulate(schedule, dataclasses.replace(Costs.uniform(4), cores=cores))
    work = sum(alone.busy_seconds(rank) for rank in range(4))
    assert max(alone.seconds, work / cores) <= shared.seconds <= work
    if cores >= 4:
        assert shared == alone
    if cores == 1:
        assert shared.seconds == pytest.approx(work)


def test_sixteen_ranks_on_two_cores_are_at_most_twice_as_fast_as_one():
    costs = dataclasses.replace(Costs.uniform(16), cores=2)
    seconds = simulate(make("1f1b", ScheduleSpec(tuple((stage,) for stage in range(16)), 32)), costs).seconds
    assert 32 * 16 * 2 / 2 <= seconds < 1.1 * 32 * 16 * 2 / 2
