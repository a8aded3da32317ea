"""Plans whose stages all have the same number of replicas: interleaved and zero-bubble with data parallelism."""

import dataclasses
import itertools
import math
import random

import pytest
from support.planning_cases import chain, cluster_of, profile_of, random_graph, stage_by_hand

from autopipe.commands.planning.choose import search
from autopipe.errors import PlanError
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.cuts import Cuts
from autopipe.planning import PlanOptions, api, make_plan
from autopipe.planning.baselines import compare_plan, explain_plan
from autopipe.planning.cost.peaks import with_peaks
from autopipe.planning.cost.predict import predict
from autopipe.planning.requests import PlanRequest
from autopipe.planning.search.problem import Problem
from autopipe.planning.search_space import MOST_PAIRS, Space
from autopipe.planning.simulated_scores import simulated
from autopipe.schedules import validate
from autopipe.schedules.registry import REGISTRY, make

LAYERS = chain(8, weight=2**29, saved=2**26, output=2**20)


def flat(num_ranks, bandwidth=1e10, memory=0):
    return Cluster((Level("link", num_ranks, bandwidth, 1e-5),), (ClusterDevice("device", memory),), "test")


def silent(what, fraction):
    pass


def reduced(profile, cluster, positions, k, d):
    """Return the seconds of a ring all-reduce of a stage's gradients over its replicas, once a minibatch."""
    graph, edges = profile.graph, [0, *positions, len(profile.graph.nodes)]
    nodes = Cuts(graph).stage_nodes(edges[k], edges[k + 1])
    names = {name for node in nodes for name in node.parameters}
    trained = sum(graph.parameters[name].num_bytes({}) for name in names if graph.parameters[name].requires_grad)
    level = cluster.levels[0]
    return 2 * (d - 1) / d * trained / level.bandwidth + 2 * (d - 1) * level.latency_seconds


@pytest.mark.parametrize("seed", range(30))
def test_no_cuts_are_better_than_the_planners(seed):
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randrange(4, 10))
    profile = profile_of(graph, rng)
    p, d = rng.choice((1, 2, 3)), rng.choice((2, 3))
    share = rng.choice((1, 2, 4))
    m = share * d
    cluster = dataclasses.replace(cluster_of(rng, p * d), levels=(Level("link", p * d, 1e6, 1e-6),))
    if set(graph.parameters) - {name for node in graph.nodes for name in node.parameters}:
        graph = dataclasses.replace(
            graph, parameters={n: s for n, s in graph.parameters.items() if any(n in x.parameters for x in graph.nodes)}
        )
        profile = dataclasses.replace(profile, graph=graph)
    options = PlanOptions(
        num_ranks=p * d, batch_size=4 * m, num_microbatches=m, schedule="zero-bubble", replicas=d, recompute="never"
    )
    best = math.inf
    for positions in itertools.combinations(Cuts(graph).legal, p - 1):
        # what happens once a minibatch weighs as in a pipeline of m / d microbatches
        seconds = [
            stage_by_hand(profile, cluster, positions, k, share, 4, min(p, share), 1)["never"][0]
            + reduced(profile, cluster, positions, k, d) / share
            for k in range(p)
        ]
        best = min(best, max(seconds) / d)
    if math.isinf(best):
        with pytest.raises(PlanError):
            make_plan(profile, cluster, options)
        return
    plan = make_plan(profile, cluster, options)
    assert plan.predicted.bottleneck_seconds == pytest.approx(best, rel=1e-9)
    assert [stage.ranks for stage in plan.stages] == [tuple(range(k * d, k * d + d)) for k in range(p)]
    validate(make(plan.schedule, plan.request()))


@pytest.mark.parametrize(
    ("name", "v"), [("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1), ("zero-bubble", 2)]
)
@pytest.mark.parametrize("d", [2, 3])
def test_the_formula_has_room_for_the_peaks_of_the_schedule(name, v, d):
    """Replicas hold what one pipeline holds of its share; the count along the schedule finds no more."""
    options = PlanOptions(
        num_ranks=2 * d, batch_size=8 * d, num_microbatches=4 * d, schedule=name, stages_per_rank=v, replicas=d
    )
    alone = dataclasses.replace(options, num_ranks=2, batch_size=8, num_microbatches=4, replicas=1)
    profile = chain(8, weight=2**20, saved=2**24, output=2**10)
    plan, single = make_plan(profile, flat(2 * d), options), make_plan(profile, flat(2), alone)
    assert [stage.start for stage in plan.stages] == [stage.start for stage in single.stages]
    assert [stage.peak_bytes for stage in plan.stages] == [stage.peak_bytes for stage in single.stages]
    exact, exact_alone = with_peaks(plan, profile), with_peaks(single, profile)
    assert [stage.peak_bytes for stage in exact.stages] == [stage.peak_bytes for stage in exact_alone.stages]
    per_rank = [sum(stage.peak_bytes for stage in each.stages if 0 in stage.ranks) for each in (exact, plan)]
    assert per_rank[0] <= per_rank[1] * 1.01


@pytest.mark.parametrize("request_", [PlanRequest(), PlanRequest(schedule="interleaved")])
def test_the_space_has_the_layouts_of_ptd_p(request_):
    """Every number of replicas that divides the ranks, with several stages on each rank of the groups."""
    space = Space.of(request_, 16, 64, links_known=True)
    layouts = {
        (options.num_groups, options.stages_per_rank, options.replicas)
        for options in space.choices("auto")
        if options.schedule == "interleaved" and options.num_ranks == 16 and options.num_groups > 1
    }
    assert layouts == {(p, v, 16 // p) for p in (2, 4, 8, 16) for v in (2, 3, 4)}
    assert all(options.replicas == 1 for options in space.choices("never"))
    # fewer ranks, as with stages of different numbers of replicas; one group only if the schedule is named
    equal = [options for options in space.replicated if options.replicas > 1]
    assert {options.num_ranks for options in equal} == ({16, 8, 4, 2} if request_.schedule else {16, 8, 4})
    assert any(options.num_groups == 1 for options in equal) == bool(request_.schedule)


def test_if_the_links_are_assumed_auto_does_not_interleave():
    assert all(options.replicas == 1 for options in Space.of(PlanRequest(), 16, 64).choices("auto"))


def test_stages_per_rank_are_kept_with_replicas():
    space = Space.of(PlanRequest(schedule="interleaved", stages_per_rank=3), 6, 32)
    assert [(options.replicas, options.stages_per_rank) for options in space.replicated] == [(2, 3), (3, 3)]
    # no number of replicas leaves two groups of three ranks: the plans without replicas remain
    assert Space.of(PlanRequest(schedule="interleaved", stages_per_rank=3), 3, 32).choices("auto")


def test_interleaving_with_replicas_is_chosen_where_it_is_the_fastest():
    cluster = flat(8)
    space = Space.of(PlanRequest(), 8, 8, links_known=True)
    plan, _ = search(LAYERS, cluster, space.choices("auto"), silent)
    assert plan.schedule == "interleaved"
    assert plan.stage_ranks == ((0, 1), (2, 3), (4, 5), (6, 7)) * 2
    assert plan.schedule_options == {"stages_per_rank": 2}
    assert plan.predicted == predict(plan, LAYERS, cluster)
    others = [
        search(LAYERS, cluster, choices, silent)[0].predicted.step_seconds
        for choices in (space.unreplicated, [o for o in space.replicated if o.may_replicate])
    ]
    assert plan.predicted.step_seconds < 0.9 * min(others)
    comparison = compare_plan(plan, LAYERS, cluster, space)
    assert comparison.contenders[-1].plan == plan
    explanation = explain_plan(plan, LAYERS, cluster, space)
    assert [cut.node for cut in explanation.cuts] == [stage.first for stage in plan.stages[1:]]


@pytest.mark.parametrize(
    ("bandwidth", "batch", "memory"), [(1e8, 8, 0), (1e10, 16, 0), (1e10, 16, 2**33), (1e9, 8, 2**34)]
)
def test_what_is_left_out_of_the_search_is_not_faster(bandwidth, batch, memory, monkeypatch):
    cluster = flat(8, bandwidth, memory)
    choices = Space.of(PlanRequest(), 8, batch, links_known=True).choices("auto")
    plan, _ = search(LAYERS, cluster, choices, silent)
    monkeypatch.setattr(api, "least_step_seconds", lambda *_: 0.0)
    assert search(LAYERS, cluster, choices, silent)[0] == plan


@pytest.mark.parametrize(
    ("weight", "output", "ranks"),
    [(2**29, 2**10, ((0, 1), (2, 3))), (2**10, 2**28, ((0, 2), (1, 3)))],
)
def test_the_larger_messages_take_the_faster_links(weight, output, ranks):
    """Replicas of large weights are neighbours; with large values between stages, the stages of a pipeline are."""
    levels = Level("node", 2, 1e10, 1e-6), Level("network", 2, 1e9, 1e-5)
    cluster = Cluster(levels, (ClusterDevice("device"),), "test")
    options = PlanOptions(
        num_ranks=4, batch_size=8, num_microbatches=8, schedule="interleaved", stages_per_rank=2, replicas=2
    )
    plan = make_plan(chain(8, weight=weight, saved=2**20, output=output), cluster, options)
    assert plan.stage_ranks == ranks * 2


def test_a_search_over_too_many_pairs_of_cuts_is_left_out_unless_it_was_requested():
    auto, asked = (
        {
            options.most_pairs
            for options in Space.of(request_, 8, 8, links_known=True).replicated
            if options.replicas > 1
        }
        for request_ in (PlanRequest(), PlanRequest(schedule="interleaved"))
    )
    assert (auto, asked) == ({MOST_PAIRS}, {math.inf})
    options = PlanOptions(num_ranks=4, batch_size=8, schedule="interleaved", stages_per_rank=2, replicas=2)
    make_plan(LAYERS, flat(4), options)
    with pytest.raises(PlanError, match="a search for 4 stages evaluates 768 pairs of cuts, more than 700"):
        make_plan(LAYERS, flat(4), dataclasses.replace(options, most_pairs=700))


def test_fewer_microbatches_than_replicas_are_refused():
    options = PlanOptions(num_ranks=4, batch_size=8, num_microbatches=1, schedule="zero-bubble", replicas=2)
    with pytest.raises(PlanError, match="1 microbatch cannot be shared by 2 replicas of every stage"):
        make_plan(LAYERS, flat(4), options)


def test_stages_that_differ_in_replicas_are_refused_by_the_schedules_that_cannot_run_them():
    assert {name for name, kind in REGISTRY.items() if kind.equal_replicas} == {"interleaved", "zero-bubble"}
    with pytest.raises(PlanError, match="needs the same number of replicas at every stage"):
        PlanOptions(num_ranks=4, batch_size=8, schedule="zero-bubble", may_replicate=True)


def test_of_many_ranks_a_part_that_is_large_has_no_equal_replicas():
    request = PlanRequest(schedule="interleaved")
    counts = [
        {options.num_ranks for options in Space.of(request, ranks, 4096).replicated if options.replicas > 1}
        for ranks in (32, 128)
    ]
    assert counts == [{2, 4, 8, 16, 32}, {2, 4, 8, 16, 32, 128}]


def test_contradicting_options_are_not_ruled_out_by_a_faster_plan():
    cluster, options = flat(4), PlanOptions(num_ranks=4, batch_size=8, schedule="interleaved", replicas=2)
    instant = make_plan(LAYERS, cluster, options)
    instant = dataclasses.replace(instant, predicted=dataclasses.replace(instant.predicted, step_seconds=0.0))
    assert api.cannot_beat(instant, LAYERS, cluster, options)
    wrong = dataclasses.replace(options, microbatch_size=16)  # larger than the batch: the search refuses it
    assert not api.cannot_beat(instant, LAYERS, cluster, wrong)


@pytest.mark.parametrize("score", [None, "simulator"])
def test_shares_that_do_not_form_equal_rounds_are_refused(score):
    """10 microbatches on 2 pipelines of 3 ranks: each runs 5, which cannot be rounds of at least 3."""
    options = PlanOptions(
        num_ranks=4, batch_size=20, num_microbatches=10, schedule="interleaved", stages_per_rank=2, replicas=2
    )
    cluster = flat(4)
    with pytest.raises(PlanError, match="do not divide into 2 rounds") as caught:
        make_plan(LAYERS, cluster, options, score=score and simulated(LAYERS, cluster))
    assert caught.value.remedy == "use 8 or 12 microbatches"


def test_microbatch_counts_with_unequal_rounds_are_not_chosen():
    options = PlanOptions(num_ranks=4, batch_size=10, schedule="interleaved", stages_per_rank=2, replicas=2)
    plan = make_plan(LAYERS, flat(4), options)
    validate(make(plan.schedule, plan.request()))


@pytest.mark.parametrize("replicas", [1, 2])
def test_interleaved_with_one_stage_per_rank_is_planned_with_the_memory_that_it_takes(replicas):
    options = PlanOptions(
        num_ranks=4 * replicas,
        batch_size=16 * replicas,
        num_microbatches=16 * replicas,
        schedule="interleaved",
        replicas=replicas,
        recompute="never",
    )
    plan = make_plan(LAYERS, flat(4 * replicas), options)
    problem = Problem(LAYERS, flat(4 * replicas), options, Cuts(LAYERS.graph), 16 * replicas)
    planned = tuple(problem.in_flight_and_versions(stage, 4)[0] for stage in range(4))
    assert planned == make(plan.schedule, plan.request()).in_flight == (7, 5, 3, 1)


@pytest.mark.parametrize("d", [1, 2])
def test_stages_that_share_a_device_divide_its_memory_by_their_weights_too(d):
    """The weights of the rank's stages are equal; the microbatches in flight are 8 and 4 of a thousandth of that."""
    options = PlanOptions(
        num_ranks=2 * d, batch_size=8 * d, num_microbatches=8 * d, schedule="interleaved", stages_per_rank=4, replicas=d
    )
    weight = 2**20  # with its gradient and the optimizer's state, four times as much
    profile = chain(8, weight=weight, saved=2**10, output=2**8)
    needed = 4 * 4 * weight
    plan = make_plan(profile, flat(2 * d, memory=round(1.02 * needed)), options)
    assert len(plan.stages) == 8
    with pytest.raises(PlanError, match=r"but .* are available"):
        make_plan(profile, flat(2 * d, memory=needed), options)


def test_a_large_first_stage_takes_memory_that_the_others_of_its_device_do_not_need():
    """Eight layers in eight stages on two ranks. The first is as large as two: rank 0 needs 5 layers, rank 1 four."""
    options = PlanOptions(
        num_ranks=2, batch_size=8, num_microbatches=8, schedule="interleaved", stages_per_rank=4, replicas=1
    )
    profile = chain(8, weight=2**20, saved=2**10, output=2**8)
    spec = profile.graph.parameters["layer0.weight"]
    parameters = {**profile.graph.parameters, "layer0.weight": dataclasses.replace(spec, shape=(2 * spec.shape[0],))}
    profile = dataclasses.replace(profile, graph=dataclasses.replace(profile.graph, parameters=parameters))
    needed = 4 * 5 * 2**20
    plan = make_plan(profile, flat(2, memory=round(1.02 * needed)), options)
    assert [stage.start for stage in plan.stages] == list(range(8))
    assert sum(stage.peak_bytes for stage in plan.stages[::2]) <= 1.02 * needed
    with pytest.raises(PlanError, match=r"but .* are available"):
        make_plan(profile, flat(2, memory=needed), options)
