"""The pass that lets stages take turns on a device: its row and its memory by hand, and the overlap of its copies."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import COPIES, ScheduleSpec
from autopipe.schedules import Costs, MessageBytes, make, simulate, validate
from autopipe.schedules.costs import SpillCosts, StageCosts
from autopipe.schedules.spilling.memory import SpilledBytes, spilled_peaks

MESSAGES = MessageBytes({(0, 1): 5, (1, 2): 5}, {(2, 1): 3, (1, 0): 3})


def request(stages=3, m=2, minibatches=1, **options):
    return ScheduleSpec(((0,),) * stages, m, minibatches, options=options)


def row(**options):
    return " ".join(str(i).replace("@0", "") for i in make("spilled", request(**options)).rows[0])


def test_a_stage_steps_behind_its_last_backward_and_the_next_is_loaded_meanwhile():
    assert row() == ("0L 1L 0F0 0F1 0U 2L 1F0 1F1 2O 2F0 2F1 2B0 2B1 2S 2U 1O 0L 1B0 1B1 1S 1U 0O 0B0 0B1 0S 0U")


def test_late_steps_need_a_second_round():
    assert row(late=1) == (
        "0L 1L 0F0 0F1 0U 2L 1F0 1F1 2F0 2F1 2B0 2B1 2U 0L 1B0 1B1 1U 0B0 0B1 0U 0L 0O 1L 0S 0U 1O 2L 1S 1U 2O 2S 2U"
    ) or row(late=1).endswith("0S 0U 1O 2L 1S 1U 2O 2S 2U")
    steps = row(late=1).split()
    assert steps.index("0S") > max(steps.index(f"{stage}B1") for stage in range(3))


def test_several_ranks_are_refused():
    with pytest.raises(ScheduleError, match="spilled runs all stages on one device"):
        make("spilled", ScheduleSpec(((0,), (1,)), 2))


SIZES = [SpilledBytes(casts=2, gradients=20, kept=1, working=50, stepping=30)] * 3


def test_the_memory_is_that_counted_by_hand():
    peaks = spilled_peaks(make("spilled", request()), 100, SIZES, MESSAGES)
    # every stage keeps 1 of each microbatch until its backward, and the activations that it received stay as long
    kept, received = 2 * 1, 2 * 5
    # stage 1 is still there, with its casts
    first_backward_of_2 = 100 + 3 * kept + 2 * received + 2 * 2 + 50 + 20 + 3
    step_of_2 = 100 + 2 * kept + received + 2 * 2 + 20 + 30 + 2 * 3
    assert peaks[2] == max(first_backward_of_2, step_of_2)
    first_backward_of_0 = 100 + kept + 2 + 50 + 20 + 2 * 3
    step_of_0 = 100 + 2 + 20 + 30
    forward_of_0 = 100 + kept + received + 2 + 50
    assert peaks[0] == max(first_backward_of_0, step_of_0, forward_of_0)


def test_messages_on_the_host_take_memory_only_around_their_use():
    here = spilled_peaks(make("spilled", request(m=8)), 100, SIZES, MESSAGES)
    there = spilled_peaks(make("spilled", request(m=8, messages_on_host=1)), 100, SIZES, MESSAGES)
    assert all(less < more for less, more in zip(there, here, strict=True))


@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.booleans(), st.integers(0, 60), st.integers(0, 9))
@settings(deadline=None, max_examples=100)
def test_all_memory_is_released_at_the_end(stages, m, late, messages, gradients, sent):
    sizes = [SpilledBytes(1, gradients + k, 3 * k, 7, 2 * k) for k in range(stages)]
    edges = [(k, k + 1) for k in range(stages - 1)]
    traffic = MessageBytes(dict.fromkeys(edges, sent), {(b, a): sent for a, b in edges})

    def peaks(minibatches):
        spec = request(stages, m, minibatches, late=int(late), messages_on_host=int(messages))
        schedule = make("spilled", spec)
        validate(schedule)
        return spilled_peaks(schedule, 11, sizes, traffic)

    assert peaks(4) == peaks(2)


def steady(costs, stages, m, **options):
    def seconds(minibatches):
        return simulate(make("spilled", request(stages, m, minibatches, **options)), costs).seconds

    return seconds(4) - seconds(3)


@pytest.mark.parametrize("load", [0.1, 1.0, 4.0, 12.0, 40.0])
def test_copies_overlap_with_computation(load):
    """A stage takes at most 1/0.95 of the longer one of its computation and its copies in either direction."""
    stages, m = 16, 4
    spill = SpillCosts(weights=load, optimizer=2 * load)
    costs = Costs((StageCosts(1.0, 3.0, step_seconds=0.5),) * stages, spill=(spill,) * stages)
    ideal = stages * (max(m * 1.0, load) + max(m * 3.0 + 0.5, 3 * load))
    assert steady(costs, stages, m) <= ideal / 0.95


def test_weights_that_are_still_there_are_not_copied_again():
    costs = Costs((StageCosts(0.0, 0.0),) * 2, spill=(SpillCosts(weights=1.0),) * 2)
    # two stages have a slab each: after their steps, the slabs contain the newest weights
    assert steady(costs, 2, 3) == 0.0
    assert steady(dataclasses.replace(costs, stages=costs.stages[:1] * 5, spill=costs.spill[:1] * 5), 5, 3) > 0.0


def test_each_copy_takes_time_of_the_rank_to_begin():
    free = Costs((StageCosts(1.0, 3.0),) * 5, spill=(SpillCosts(),) * 5)
    begun = dataclasses.replace(free, spill=(SpillCosts(begin=0.25),) * 5)
    row = make("spilled", request(5, 2, 4)).rows[0]
    copies = sum(i.minibatch == 3 and i.op in COPIES for i in row)
    assert steady(begun, 5, 2) == steady(free, 5, 2) + 0.25 * copies
