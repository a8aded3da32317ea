"""The planner's microbatches in flight equal those of the schedule, counted by instruction."""

from collections import Counter

import pytest

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import ScheduleSpec
from autopipe.planning.cost.memory import in_flight_of_interleaved
from autopipe.schedules import make


def most_in_flight(schedule):
    """Return the most forwards of each stage whose backward is not done."""
    now, most = Counter(), Counter()
    for row in schedule.rows:
        for instruction in row:
            if instruction.op == "F":
                now[instruction.stage] += 1
                most[instruction.stage] = max(most[instruction.stage], now[instruction.stage])
            elif instruction.op == "B":
                now[instruction.stage] -= 1
    return most


@pytest.mark.parametrize("num_ranks", range(1, 6))
@pytest.mark.parametrize("stages_per_rank", [2, 3, 4])
def test_interleaved_stages_hold_the_microbatches_of_the_formula(num_ranks, stages_per_rank):
    taken = 0
    for num_microbatches in range(1, 25):
        layout = tuple((stage % num_ranks,) for stage in range(num_ranks * stages_per_rank))
        try:
            in_flight = most_in_flight(make("interleaved", ScheduleSpec(layout, num_microbatches)))
        except ScheduleError:  # rounds of different sizes
            continue
        taken += 1
        for stage, most in in_flight.items():
            assert most == in_flight_of_interleaved(stages_per_rank, num_ranks, num_microbatches, stage)
    assert taken >= 4
