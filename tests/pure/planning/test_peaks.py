"""The peak bytes of stages including messages: by hand, without a leak, and as the limit of a plan."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning_cases import even_profile

from autopipe.errors import PlanError, ScheduleError
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.schedule import ScheduleSpec, StageEdges
from autopipe.planning import PlanOptions, make_plan
from autopipe.planning.cost.peaks import MOST_SEARCHES, memory_shortfall, search_within_memory, with_peaks
from autopipe.schedules import REGISTRY, MessageBytes, StageBytes, lower, make, peak_bytes, stage_peaks, to_csv
from autopipe.schedules.kind import line

MESSAGES = MessageBytes({(0, 1): 10}, {(1, 0): 4})


def rows(name, request, messages):
    return lower(make(name, request), StageEdges(tuple(messages.forward), tuple(messages.backward)))


def test_messages_are_counted_from_when_they_are_posted():
    sizes = [StageBytes(0, 100, 50), StageBytes(0, 100, 60)]
    # stage 0: two microbatches in flight, and two awaited gradients; stage 1: one microbatch, the next input, and the
    # gradient that it has just sent
    assert stage_peaks(rows("1f1b", line(2, 3), MESSAGES), sizes, MESSAGES) == (100 + 2 * 50 + 2 * 4, 100 + 60 + 10 + 4)
    # stage 0: before the first backward it awaits that gradient and the next two
    assert stage_peaks(rows("gpipe", line(2, 3), MESSAGES), sizes, MESSAGES) == (100 + 3 * 50 + 3 * 4, 100 + 3 * 60)


def test_weight_gradients_are_counted_from_the_first_backward_to_the_step():
    sizes = [StageBytes(0, 100, 50, gradients=30)] * 2
    # the second forward of stage 1 follows its first backward; with gpipe one fewer is in flight by then
    assert stage_peaks(make("1f1b", line(2, 3)), sizes, MessageBytes()) == (100 + 2 * 50 + 30, 100 + 50 + 30)
    assert stage_peaks(make("gpipe", line(2, 3, 2)), sizes, MessageBytes()) == (100 + 3 * 50, 100 + 3 * 50)
    # a forward of the next minibatch precedes the step, but no backward
    two = stage_peaks(make("2bw", line(2, 2, 4)), sizes, MessageBytes())
    assert two == (2 * 100 + 2 * 50 + 30, 2 * 100 + 50 + 30)


def test_values_between_stages_of_one_rank_belong_to_the_producer():
    request = ScheduleSpec(((0,), (1,), (0,)), 1)
    messages = MessageBytes({(0, 2): 10}, {(2, 0): 4})
    sizes = [StageBytes(0, 0, 50), StageBytes(0, 0, 1), StageBytes(0, 0, 60)]
    # stage 2 reads a value that stage 0 holds; its gradient is held until stage 0's backward is done
    assert stage_peaks(rows("gpipe", request, messages), sizes, messages) == (50, 1, 50)


@given(
    st.sampled_from([name for name, kind in REGISTRY.items() if name != "custom" and not kind.spills]),
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(0, 9),
    st.integers(0, 9),
)
@settings(deadline=None, max_examples=60)
def test_all_memory_is_released_at_the_end(name, p, rounds, forward, backward):
    v = 2 if name == "interleaved" else 1
    edges = [(a, b) for a in range(p * v) for b in range(a + 1, p * v)]
    messages = MessageBytes(dict.fromkeys(edges, forward), {(b, a): backward for a, b in edges})
    sizes = [StageBytes(7, 100, 10 + forward * stage, 3) for stage in range(p * v)]

    def peaks(num_minibatches):
        ranks = tuple((stage % p,) for stage in range(p * v))
        request = dataclasses.replace(line(p, p * rounds, num_minibatches), stage_ranks=ranks)
        return stage_peaks(rows(name, request, messages), sizes, messages)

    assert peaks(12) == peaks(6)


def test_without_messages_the_peak_is_the_memory_of_a_rank():
    sizes = [StageBytes(5, 100, 10 + k) for k in range(3)]
    for name in ("gpipe", "1f1b", "2bw"):
        schedule = make(name, line(3, 6, 3))
        assert stage_peaks(schedule, sizes, MessageBytes()) == peak_bytes(schedule, sizes)
    with pytest.raises(ScheduleError, match="sizes of 1 stages were given for 3 stages"):
        stage_peaks(make("1f1b", line(3, 6)), sizes[:1], MessageBytes())


def cluster_with(memory):
    return Cluster((Level("host", 2, 1e9, 1e-4),), (ClusterDevice("cpu", memory),), "test")


PROFILE, OPTIONS = even_profile(skips=True), PlanOptions(num_ranks=2, batch_size=16, num_microbatches=4)


def find(room):
    return make_plan(PROFILE, room, OPTIONS)


def most(plan):
    return max(stage.peak_bytes for stage in plan.stages)


def test_a_plan_fits_with_its_messages():
    free = search_within_memory(PROFILE, cluster_with(0), find)
    assert free == with_peaks(find(cluster_with(0)), PROFILE)
    assert most(free) > most(find(cluster_with(0)))  # the formula does not include messages
    assert search_within_memory(PROFILE, cluster_with(most(free)), find) == free


def test_a_plan_that_fits_also_fits_with_more_memory():
    free = most(search_within_memory(PROFILE, cluster_with(0), find))
    fits = []
    for memory in range(free + 2, free // 4, -free // 150):
        try:
            plan = search_within_memory(PROFILE, cluster_with(memory), find)
        except PlanError as refused:
            assert "fit" in str(refused) or "memory" in str(refused)
            fits.append(False)
        else:
            assert most(plan) <= memory
            fits.append(True)
    assert fits == sorted(fits, reverse=True)
    assert any(fits) and not all(fits)


def test_only_ranks_over_their_limit_get_a_smaller_one():
    rooms = []

    def noting(room):
        rooms.append([device.memory_bytes for device in room.devices])
        return find(room)

    devices = ClusterDevice("small", 150_000), ClusterDevice("large", 10_000_000)
    plan = search_within_memory(PROFILE, dataclasses.replace(cluster_with(0), devices=devices), noting)
    assert plan.stages[0].peak_bytes <= 150_000
    assert len(rooms) > 1 and rooms[-1][0] < 150_000
    assert {large for _, large in rooms} == {10_000_000}


def test_an_interrupted_search_is_not_repeated():
    free, searches = most(search_within_memory(PROFILE, cluster_with(0), find)), []

    def noting(room):
        searches.append(room)
        return find(room)

    with pytest.raises(PlanError, match=r"no plan fits: the best one needs .* more than its device has"):
        search_within_memory(PROFILE, cluster_with(free - 1), noting, lambda: True)
    assert len(searches) == 1


def test_deep_pipelines_without_a_flush_are_simulated_until_full():
    profile, options = (
        even_profile(num_layers=16),
        PlanOptions(num_ranks=12, batch_size=4, schedule="pipedream", num_microbatches=1),
    )
    wide = dataclasses.replace(cluster_with(0), levels=(Level("host", 12, 1e9, 1e-4),))
    formula = make_plan(profile, wide, options)
    counted = with_peaks(formula, profile)
    weights = sum(profile.graph.parameters[name].num_bytes({}) for name in formula.stages[0].parameters)
    # the formula always counts gradients; with one microbatch per minibatch a step consumes them at once
    assert counted.stages[0].peak_bytes >= formula.stages[0].peak_bytes - weights


def test_halves_of_a_backward_are_recognised_in_the_instructions():
    profile = even_profile(num_layers=8)
    wide = dataclasses.replace(cluster_with(0), levels=(Level("host", 4, 1e9, 1e-4),))
    planned = make_plan(
        profile, wide, PlanOptions(num_ranks=4, batch_size=32, schedule="zero-bubble", num_microbatches=8)
    )
    as_grid = dataclasses.replace(
        planned, schedule="custom", schedule_text=to_csv(make("zero-bubble", planned.request(1)))
    )
    peaks = [[stage.peak_bytes for stage in with_peaks(plan, profile).stages] for plan in (planned, as_grid)]
    assert peaks[0] == peaks[1]


def test_the_first_backward_adds_gradients_while_activations_are_held():
    sizes = [StageBytes(0, 100, 50, gradients=30, first=20)]
    assert stage_peaks(make("1f1b", line(1, 1)), sizes, MessageBytes()) == (100 + 50 + 20,)
    assert stage_peaks(make("1f1b", line(1, 2)), sizes, MessageBytes()) == (100 + 50 + 30,)


def test_peaks_of_a_plan_that_is_too_large_are_not_simulated():
    plan = find(cluster_with(0))
    assert with_peaks(plan, PROFILE, most=7) is plan  # 2 ranks and 4 microbatches
    assert with_peaks(plan, PROFILE, most=8) is not plan
    stale = make_plan(PROFILE, cluster_with(0), dataclasses.replace(OPTIONS, schedule="2bw"))
    assert with_peaks(stale, PROFILE, most=8) is stale  # several minibatches are in flight


def test_a_search_that_never_fits_ends_with_the_last_refusal():
    plan = find(cluster_with(0))
    calls = []

    def stubborn(room):
        calls.append(room)
        return plan

    limit = most(search_within_memory(PROFILE, cluster_with(0), find)) - 1
    with pytest.raises(PlanError, match=r"no plan fits: the best one needs .* with its messages"):
        search_within_memory(PROFILE, cluster_with(limit), stubborn)
    assert len(calls) == MOST_SEARCHES


def test_ranks_without_enough_memory_are_named():
    plan = with_peaks(find(cluster_with(0)), PROFILE)
    assert memory_shortfall(plan, cluster_with(0)) == ""
    small = min(stage.peak_bytes for stage in plan.stages) - 1
    text = memory_shortfall(plan, cluster_with(small))
    assert text.startswith("it does not fit: with 1f1b rank ") and text.endswith("(so it is on 1 other rank too)")
    devices = ClusterDevice("small", small), ClusterDevice("large")
    one = memory_shortfall(plan, dataclasses.replace(cluster_with(0), devices=devices))
    assert "rank 0 needs" in one and "other rank" not in one
