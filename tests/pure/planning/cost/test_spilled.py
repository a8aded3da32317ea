"""Plans whose stages take turns on a device: they fit its memory, or are refused with what would be needed."""

import dataclasses
import itertools
import random

import pytest
from support.planning_cases import even_profile, profile_of, random_graph

from autopipe.errors import DoesNotFitError, PlanError
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.planning import PlanOptions, make_plan
from autopipe.planning.baselines import compare_plan
from autopipe.planning.cost.peaks import with_peaks
from autopipe.planning.explain import explain
from autopipe.planning.requests import PlanRequest
from autopipe.planning.search_space import Space
from autopipe.planning.spilled.costs import copied_bytes, peaks_of
from autopipe.planning.spilled.explain import with_offer
from autopipe.planning.spilled.search import MARGIN
from autopipe.schedules import make, validate

CASES = 500


def device_with(memory, bandwidth=1e6):
    device = ClusterDevice("device", memory, host_bandwidth=bandwidth)
    return Cluster((Level("host", 1, 1e9, 1e-6),), (device,), "test")


def options(m, batch=8, **changes):
    return PlanOptions(num_ranks=1, batch_size=batch, num_microbatches=m, schedule="spilled", **changes)


def layers(count=8, floats=20_000, outputs=100):
    """Return layers whose weights are large in comparison with what is between them."""
    profile = even_profile(count)
    nodes = tuple(
        dataclasses.replace(node, spec=dataclasses.replace(node.spec, shape=("s0", outputs)))
        for node in profile.graph.nodes
    )
    parameters = {name: dataclasses.replace(spec, shape=(floats,)) for name, spec in profile.graph.parameters.items()}
    return dataclasses.replace(profile, graph=dataclasses.replace(profile.graph, nodes=nodes, parameters=parameters))


def whole_of(profile, m=4, batch=16):
    """Return the bytes of a single stage."""
    plan = make_plan(profile, device_with(0, 1e15), options(m, batch))
    assert len(plan.stages) == 1
    return plan.stages[0].peak_bytes


def case(seed):
    rng = random.Random(seed)
    profile = profile_of(random_graph(rng, rng.randrange(2, 14)), rng)
    m = rng.choice((1, 2, 4, 8))
    whole = max(peaks_of(make_plan(profile, device_with(0, 1e15), options(m)), profile))
    return profile, round(whole * rng.uniform(0.1, 1.2)), m


@pytest.mark.parametrize("first", range(0, CASES, 50))
def test_no_plan_needs_more_than_the_memory(first):
    refused = 0
    for seed in range(first, first + 50):
        profile, memory, m = case(seed)
        try:
            plan = make_plan(profile, device_with(memory), options(m))
        except DoesNotFitError as refusal:
            refused += 1
            assert "even if every part of the model that cannot be divided further is a stage" in refusal.what
            continue
        validate(make(plan.schedule, plan.request(2)))
        assert max(peaks_of(plan, profile)) <= memory * (1 - MARGIN)
        assert with_peaks(plan, profile) == plan
        assert all(stage.spilled and stage.recompute == "stage" for stage in plan.stages)
        assert plan.predicted.step_seconds > 0
    assert refused < 50


def test_a_device_that_is_large_enough_has_one_stage_and_copies_nothing():
    profile = layers()
    plan = make_plan(profile, device_with(0, 1e15), options(4, 16))
    assert len(plan.stages) == 1
    state = profile.trained_bytes * profile.optimizer_bytes_per_byte
    # the weights remain on the device, and the optimizer state is brought for every step
    assert copied_bytes(plan, profile) == (state, state + profile.trained_bytes)


def test_less_memory_needs_more_stages():
    profile = layers()
    whole = whole_of(profile)
    counts, seconds = [], []
    for share in (1.2, 0.8, 0.6, 0.5):
        plan = make_plan(profile, device_with(round(whole * share), 1e15), options(4, 16))
        counts.append(len(plan.stages))
        seconds.append(plan.predicted.step_seconds)
    assert counts == sorted(counts) and counts[-1] > 1
    assert all(a <= b * 1.02 for a, b in itertools.pairwise(seconds))


def test_a_refusal_names_the_largest_part_and_the_bytes():
    with pytest.raises(DoesNotFitError) as caught:
        make_plan(layers(), device_with(100), options(4, 16))
    text = str(caught.value)
    assert "the device has 100 B" in text and "twice which must fit" in text and "--microbatch-size 1" in text


def test_several_ranks_and_kept_activations_are_refused():
    two = dataclasses.replace(device_with(0), levels=(Level("host", 2, 1e9, 1e-6),))
    with pytest.raises(PlanError, match="spilled uses one device, and 2 are requested"):
        make_plan(even_profile(), two, dataclasses.replace(options(4, 16), num_ranks=2))
    with pytest.raises(PlanError, match="--recompute never does not work with spilled"):
        make_plan(even_profile(), device_with(0), options(4, 16, recompute="never"))


def test_spilling_is_offered_where_nothing_else_fits():
    profile = layers()
    plain = PlanOptions(num_ranks=1, batch_size=16, num_microbatches=4, recompute="always")
    whole = whole_of(profile)
    for share in (0.5, 0.6, 0.7):
        cluster = device_with(round(whole * share))
        try:
            make_plan(profile, cluster, plain)
        except DoesNotFitError as refusal:
            offer = with_offer(refusal, profile, cluster, plain)
            assert offer.remedy.startswith(refusal.remedy)
            assert "--schedule spilled --gpus 1" in offer.remedy and "times as long as" in offer.remedy
            return
    pytest.fail("every budget fits")


def test_copies_bound_a_step_over_a_slow_bus_and_computation_over_a_fast_one():
    profile = layers()
    whole = whole_of(profile)
    limits = []
    for bandwidth in (1e2, 1e15):
        cluster = device_with(round(whole * 0.6), bandwidth)
        plan = make_plan(profile, cluster, options(4, 16))
        explanation = explain(plan, profile, cluster, options(4, 16))
        assert len(explanation.copies) == 2 * len(plan.stages) > 2
        assert f"forward of {plan.stages[0].label}: computation" in "\n".join(explanation.lines())
        limits.append(explanation.limit)
    assert limits[0].startswith("copies to the") and limits[1].startswith("computation, which bounds 100% of a step")


def test_the_comparison_names_one_device_without_spilling():
    profile = layers()
    cluster = device_with(0)
    space = Space.of(PlanRequest(schedule="spilled", num_microbatches=4), 1, 16)
    plan = make_plan(profile, cluster, space.unreplicated[0])
    result = compare_plan(plan, profile, cluster, space)
    assert [row.name for row in result.contenders] == ["single device", "this plan"]
    assert result.verdict.startswith("The model fits without spilling: --schedule 1f1b takes")
