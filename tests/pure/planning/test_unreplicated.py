"""The planner without replicas, compared with brute force over all cuts, and the invariants of its plans."""

import dataclasses
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.planning_cases import RECOMPUTE_OF, brute_force_straight, cluster_of, profile_of, random_graph

from autopipe.errors import PlanError
from autopipe.ir.artifact import canonical
from autopipe.ir.cuts import Cuts
from autopipe.planning import PlanOptions, make_best_plan, make_plan
from autopipe.planning.api import make_problems
from autopipe.planning.search import unreplicated
from autopipe.planning.search.unreplicated import unreplicated_cuts


def random_case(seed):
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randrange(3, 13))
    profile = profile_of(graph, rng)
    ranks = rng.randrange(1, min(4, len(Cuts(graph).legal) + 1) + 1)
    m = rng.choice((1, 2, 3, 5, 8))
    recompute = RECOMPUTE_OF[rng.choice(("auto", "never", "always"))][seed % 3]
    memory = rng.choice((0, 0, rng.randrange(2000, 40000)))
    cluster = cluster_of(rng, ranks, memory, mixed=rng.random() < 0.4)
    options = PlanOptions(
        num_ranks=ranks,
        batch_size=4 * m,
        num_microbatches=m,
        schedule=rng.choice(("gpipe", "1f1b")),
        recompute=recompute,
    )
    return profile, cluster, options


def solve_both_ways(seed):
    """Return (bottleneck of the planner, bottleneck of brute force, plan); infinite if nothing fits."""
    profile, cluster, options = random_case(seed)
    m, gpipe = options.num_microbatches, options.schedule == "gpipe"
    expected = brute_force_straight(profile, cluster, options.num_ranks, m, 4, gpipe, options.recompute)
    try:
        plan = make_plan(profile, cluster, options)
    except PlanError:
        return math.inf, expected, None
    return plan.predicted.bottleneck_seconds, expected, plan


def agrees(seed):
    """Return whether the planner and brute force agree."""
    actual, expected, _ = solve_both_ways(seed)
    return actual == expected or abs(actual - expected) <= 1e-9 * expected


@pytest.mark.parametrize("block", range(10))
def test_no_plan_is_better_than_the_planners(block):
    for seed in range(block * 60, block * 60 + 60):
        actual, expected, plan = solve_both_ways(seed)
        assert actual == pytest.approx(expected, rel=1e-9), seed
        if plan is None:
            continue
        profile, cluster, _ = random_case(seed)
        for stage in plan.stages:
            limit = cluster.device(stage.ranks[0]).memory_bytes
            assert not limit or stage.peak_bytes <= limit, seed
        assert set(profile.graph.parameters) == {name for stage in plan.stages for name in stage.parameters}, seed
        assert set(profile.graph.buffers) == {name for stage in plan.stages for name in stage.buffers}


def test_the_random_cases_are_not_trivial():
    stages, skips, recomputed, by_block, ties, notes = set(), 0, 0, 0, 0, 0
    for seed in range(600):
        profile, cluster, options = random_case(seed)
        try:
            plan = make_plan(profile, cluster, options)
        except PlanError:
            continue
        stages.add(len(plan.stages))
        skips += any(b.consumers[0] > b.producer + 1 or len(b.consumers) > 1 for b in plan.boundaries)
        recomputed += any(stage.recompute == "stage" for stage in plan.stages) and options.recompute == "auto"
        by_block += any(stage.recompute == "block" for stage in plan.stages) and options.recompute == "auto"
        ties += bool(plan.ties)
        notes += bool(plan.notes)
    assert stages == {1, 2, 3, 4}
    assert min(skips, recomputed, by_block, ties, notes) >= 5


def test_of_equal_plans_the_one_with_the_earliest_cuts_is_chosen():
    profile, cluster, options = random_case(3)
    graph = profile.graph
    even = {
        name: dataclasses.replace(cost, forward_seconds=0.0, backward_seconds=0.0)
        for name, cost in profile.measurements[0].costs.items()
    }
    profile = dataclasses.replace(profile, measurements=(dataclasses.replace(profile.measurements[0], costs=even),))
    free = dataclasses.replace(
        cluster,
        levels=tuple(dataclasses.replace(level, bandwidth=1e300, latency_seconds=0.0) for level in cluster.levels),
    )
    plan = make_plan(profile, free, dataclasses.replace(options, recompute="auto"))
    assert [stage.start for stage in plan.stages[1:]] == list(Cuts(graph).legal[: len(plan.stages) - 1])


def test_a_free_choice_of_microbatches_is_the_best_of_the_fixed_ones():
    rng = random.Random(5)
    graph = random_graph(rng, 12)
    profile, cluster = profile_of(graph, rng, (1, 2, 4, 8)), cluster_of(rng, 2)
    free = make_plan(profile, cluster, PlanOptions(num_ranks=2, batch_size=16))
    fixed = [
        make_plan(profile, cluster, PlanOptions(num_ranks=2, batch_size=16, num_microbatches=m)) for m in (2, 4, 8, 16)
    ]
    assert free.predicted.step_seconds == min(plan.predicted.step_seconds for plan in fixed)


def test_the_best_of_several_options_ignores_those_without_a_plan():
    rng = random.Random(5)
    graph = random_graph(rng, 12)
    profile, cluster = profile_of(graph, rng), cluster_of(rng, 2)
    fine = [
        PlanOptions(num_ranks=2, batch_size=4 * m, num_microbatches=m, schedule=name)
        for m in (4, 8)
        for name in ("1f1b", "2bw")
    ]
    impossible = PlanOptions(num_ranks=2, batch_size=4, num_microbatches=8)
    plan = make_best_plan(profile, cluster, [impossible, *fine])
    rates = [make_plan(profile, cluster, options).predicted.samples_per_second for options in fine]
    assert plan.predicted.samples_per_second == max(rates)
    with pytest.raises(PlanError, match="a batch of 4 samples cannot be cut into 8 microbatches"):
        make_best_plan(profile, cluster, [impossible, PlanOptions(num_ranks=99, batch_size=99)])
    with pytest.raises(PlanError, match="nothing to choose from"):
        make_best_plan(profile, cluster, [])


def test_a_given_score_replaces_the_formula():
    rng = random.Random(5)
    graph = random_graph(rng, 12)
    profile, cluster = profile_of(graph, rng, (1, 2, 4, 8)), cluster_of(rng, 2)

    def score(plan):
        return dataclasses.replace(plan.predicted, step_seconds=abs(plan.num_microbatches - 4) + 1.0)

    assert make_plan(profile, cluster, PlanOptions(num_ranks=2, batch_size=16), score=score).num_microbatches == 4


def test_the_flush_prediction_is_the_published_formula():
    profile, cluster, options = random_case(11)
    plan = make_plan(
        profile, cluster, dataclasses.replace(options, num_microbatches=8, batch_size=32, recompute="never")
    )
    lone = make_plan(
        profile,
        cluster_of(random.Random(1), 1),
        PlanOptions(num_ranks=1, batch_size=32, num_microbatches=8, recompute="never"),
    )
    cost = sum(c.forward_seconds + c.backward_seconds for c in profile.at(4).costs.values())
    needed = [n for n in profile.graph.nodes if n.input_only and n not in Cuts(profile.graph).stage_nodes(0, 999)]
    cost -= sum(profile.at(4).costs[n.name].forward_seconds for n in needed)
    assert lone.predicted.bottleneck_seconds == pytest.approx(cost)
    trained = sum(s.num_bytes({}) for s in profile.graph.parameters.values() if s.requires_grad)
    assert lone.predicted.step_seconds == pytest.approx(8 * cost + 1e-9 * trained)
    assert lone.predicted.bubble_fraction < 0.01
    assert plan.predicted.samples_per_second == pytest.approx(32 / plan.predicted.step_seconds)


def print_plans():
    """Print a few plans, which the determinism test compares between processes."""
    for seed in range(20):
        profile, cluster, options = random_case(seed)
        try:
            print(canonical(make_plan(profile, cluster, options)))
        except PlanError as error:
            print(error)


def test_a_plan_has_the_same_bytes_under_every_hash_seed():
    here = Path(__file__).resolve()
    outputs = set()
    for seed in range(10):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": f"{here.parents[3]}:{here.parents[2]}"}
        command = [sys.executable, "-c", "from pure.planning import test_unreplicated as t; t.print_plans()"]
        outputs.add(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    assert len(outputs) == 1
    assert len(outputs.pop()) > 5000


def test_planning_imports_no_torch():
    here = Path(__file__).resolve()
    program = "import sys, autopipe.planning; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=here.parents[3])


@pytest.mark.parametrize("stages_per_rank", [1, 2])
@pytest.mark.parametrize("recompute", ["auto", "never"])
def test_short_stages_are_enough_for_the_same_cuts(stages_per_rank, recompute, monkeypatch):
    """The search in a band of the pairs of cuts returns what the search over all pairs returns, to the last bit."""
    in_band = 0

    def counted(*args):
        nonlocal in_band
        in_band += 1
        return search(*args)

    search = unreplicated._cuts_in_band
    monkeypatch.setattr(unreplicated, "_cuts_in_band", counted)
    monkeypatch.setattr(unreplicated, "_WIDEST", 0.95)
    finite = 0
    for seed in range(20):
        rng = random.Random(seed)
        profile = profile_of(random_graph(rng, 60), rng)
        cluster = cluster_of(rng, 6, rng.choice((0, rng.randrange(20000, 200000))), mixed=seed % 2 == 0)
        options = PlanOptions(
            num_ranks=6,
            batch_size=32,
            num_microbatches=8,
            schedule="interleaved" if stages_per_rank > 1 else "1f1b",
            stages_per_rank=stages_per_rank,
            recompute=recompute,
        )
        if len(Cuts(profile.graph).legal) < options.num_stages:
            continue
        (problem,) = make_problems(profile, cluster, options)
        stages = options.num_stages

        def table(stage, problem=problem, stages=stages):
            return problem.stage_table(stage, stages)

        every = unreplicated_cuts(problem.tables.num_atoms, stages, table)
        assert unreplicated.best_cuts(problem, stages) == every
        finite += math.isfinite(every[0])
    assert min(finite, in_band) > 4, (finite, in_band)
