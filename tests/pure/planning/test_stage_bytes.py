"""The bytes of a stage have one definition: the search, the finished plan and its limit agree to the byte."""

import dataclasses
import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pure.planning.test_unreplicated import random_case as straight_case
from support.planning_cases import chain, profile_of, random_graph, replicated_case

from autopipe.errors import PlanError, ScheduleError
from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph, Input, Node, Symbol
from autopipe.ir.plan import bytes_by_rank
from autopipe.ir.profile import Measurement, NodeCost
from autopipe.ir.schedule import ScheduleSpec
from autopipe.ir.tensor import TensorSpec
from autopipe.planning import make_plan
from autopipe.planning.api import make_problems, solve_problem
from autopipe.planning.cost.atoms import Atoms
from autopipe.planning.cost.byte_sums import ByteSums
from autopipe.planning.cost.memory import even_share, in_flight_of_interleaved, stage_peak
from autopipe.planning.search import replicated, solver
from autopipe.schedules import make

TERMS = ("weights", "gradients", "stepped", "optimizer", "largest", "saved", "kept", "between", "workspace")


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from((0.0, 0.3, 1.0, 2.0, 2.7)))
def test_the_terms_of_a_plan_are_the_entries_of_the_tables(seed, optimizer_bytes_per_byte):
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randrange(2, 14))
    atoms = Atoms(graph, Cuts(graph), profile_of(graph, rng).at(4))
    sums = ByteSums(atoms, optimizer_bytes_per_byte)
    tables = sums.tables()
    chosen = [0, *sorted(rng.sample(range(1, atoms.count), rng.randrange(atoms.count))), atoms.count]
    stages = sums.along([atoms.edges[i] for i in chosen[:-1]])
    for terms, (i, j) in zip(stages, itertools.pairwise(chosen), strict=True):
        assert [getattr(terms, name) for name in TERMS] == [getattr(tables, name)[i, j] for name in TERMS]
        assert all(isinstance(getattr(terms, name), int) for name in TERMS)


def terms_of_two_stages(nodes, buffers):
    spec = TensorSpec(("s0", 4), "float32")
    graph = Graph("toy", (Input("x", spec),), (Symbol("s0", "x", 0, 4),), nodes, (nodes[-1].name,), {}, buffers, {})
    costs = {node.name: NodeCost(1.0, 1.0, 64, 0) for node in nodes}
    sums = ByteSums(Atoms(graph, Cuts(graph), Measurement(4, costs)), 0.0)
    return sums.along([0, len(nodes) - 1])


def test_a_value_that_only_orders_two_nodes_is_not_kept_by_the_later_stage():
    spec = TensorSpec(("s0", 4), "float32", requires_grad=True)
    first = Node("first", "call_function", "f", ("x",), spec)
    middle = Node("middle", "call_function", "f", ("first",), spec)
    last = Node("last", "call_function", "f", ("middle",), spec)
    plain = terms_of_two_stages((first, middle, last), {})
    ordered = terms_of_two_stages((first, middle, dataclasses.replace(last, after=("first",))), {})
    assert [terms.kept for terms in ordered] == [terms.kept for terms in plain] == [64, 64]


def test_every_stage_that_computes_an_input_only_value_has_the_buffer_it_reads():
    spec = TensorSpec(("s0", 4), "float32", requires_grad=True)
    mask = Node("mask", "call_function", "f", ("x",), TensorSpec(("s0", 4), "float32"), buffers=("b",), input_only=True)
    first = Node("first", "call_function", "f", ("x", "mask"), spec)
    last = Node("last", "call_function", "f", ("first", "mask"), spec)
    buffers = {"b": TensorSpec((10,), "float32")}
    assert [terms.weights for terms in terms_of_two_stages((mask, first, last), buffers)] == [40, 40]
    last = dataclasses.replace(last, inputs=("first",))
    assert [terms.weights for terms in terms_of_two_stages((mask, first, last), buffers)] == [40, 0]


def searched_bytes(problem, plan):
    """Return the peak of every stage of a plan as the search computed it."""
    tables, last = problem.tables, len(problem.profile.graph.nodes)
    edges = [tables.edges.index(stage.start) for stage in plan.stages] + [tables.edges.index(last)]
    peaks = []
    for stage, (i, j) in zip(plan.stages, itertools.pairwise(edges), strict=True):
        if not problem.options.may_replicate:
            peaks.append(problem.stage_peak(stage.index, len(plan.stages), mode_of(problem, stage))[i, j])
            continue
        arrays = next(a for a in candidate_arrays(problem) if fits(a, plan))
        width = int(arrays.rules[solver.WIDTH])
        replicas = stage.replicas // width
        behind = sum(other.replicas for other in plan.stages[stage.index + 1 :]) // width
        in_flight, versions = solver.in_flight_and_versions(arrays.rules, replicas, behind)
        entries = (arrays.tables[k][i, j] for k in (solver.WEIGHTS, solver.STATE, solver.KEPT, solver.SAVED))
        weights, fixed, kept, saved = entries
        saved_in_flight = 1 if stage.recompute == "stage" else in_flight
        if mode_of(problem, stage) == "block":
            fixed, saved = (arrays.tables[k][i, j] for k in (solver.BLOCK_STATE, solver.CROSSING))
        if problem.options.sharded:
            optimizer, largest = (arrays.tables[k][i, j] for k in (solver.OPTIMIZER, solver.LARGEST))
            fixed -= max(optimizer - even_share(optimizer, largest, stage.replicas), 0)
        peaks.append(stage_peak(weights, versions, fixed, kept, in_flight, saved, saved_in_flight))
    return peaks


def mode_of(problem, stage):
    """Return the mode that the search chose: a stage without a unit that runs again has "never" in the plan."""
    return "block" if stage.recompute == "never" and "never" not in problem.modes else stage.recompute


def candidate_arrays(problem):
    return [replicated.arrays_of(problem, width) for width in sorted(replicated.widths(problem), reverse=True)]


def fits(arrays, plan):
    """Return whether the plan's replicas lie in the groups of these arrays: one rank of each group at a time."""
    width = int(arrays.rules[solver.WIDTH])
    if width == 1:
        return True
    group = arrays.num_ranks
    return all({rank // group for rank in stage.ranks[:width]} == set(range(width)) for stage in plan.stages)


def problem_and_plan(profile, cluster, options):
    (problem,) = make_problems(profile, cluster, options)
    return problem, solve_problem(problem)


def with_limits(cluster, limits):
    """Return the cluster with these bytes on each rank; equal limits on equal devices make one description."""
    devices = tuple(
        dataclasses.replace(cluster.device(rank), memory_bytes=limits[rank]) for rank in range(cluster.num_ranks)
    )
    return dataclasses.replace(cluster, devices=devices if len(set(devices)) > 1 else devices[:1])


def sharded_case(seed):
    profile, cluster, options = replicated_case(seed)
    return profile, cluster, dataclasses.replace(options, sharded=True)


@pytest.mark.parametrize("case", [straight_case, replicated_case, sharded_case])
def test_the_search_and_the_plan_have_the_same_bytes(case):
    planned = 0
    for seed in range(300):
        problem, plan = problem_and_plan(*case(seed))
        if plan is None:
            continue
        planned += 1
        assert [stage.peak_bytes for stage in plan.stages] == searched_bytes(problem, plan), seed
        limits = bytes_by_rank(plan.stages)
        for rank, needed in limits.items():
            assert not problem.cluster.memory_of(rank) or needed <= problem.cluster.memory_of(rank), seed
    assert planned > 150


@pytest.mark.parametrize("case", [straight_case, replicated_case, sharded_case])
def test_exactly_the_bytes_of_a_plan_are_enough_and_one_less_is_not(case):
    tried = refused = 0
    for seed in range(120):
        profile, cluster, options = case(seed)
        options = dataclasses.replace(options, recompute=random.Random(seed).choice(("never", "always")))
        _, plan = problem_and_plan(profile, cluster, options)
        if plan is None or (options.may_replicate and len(cluster.devices) > 1):
            continue  # where devices differ, replicated plans use all of them
        tried += 1
        needed = bytes_by_rank(plan.stages)
        if options.may_replicate:
            needed = dict.fromkeys(range(cluster.num_ranks), max(needed.values()))
        exact = make_plan(profile, with_limits(cluster, needed), options)
        assert exact.predicted.step_seconds == plan.predicted.step_seconds, seed
        assert all(used <= needed[rank] for rank, used in bytes_by_rank(exact.stages).items()), seed
        for ranks in [[rank] for rank in needed] if not options.may_replicate else [list(needed)]:
            less = needed | {rank: needed[rank] - 1 for rank in ranks}
            try:
                tight = make_plan(profile, with_limits(cluster, less), options)
            except PlanError:
                refused += 1
                continue
            assert tight.digest != plan.digest, seed
            assert all(used <= less[rank] for rank, used in bytes_by_rank(tight.stages).items()), seed
    assert tried > 40
    assert refused > 20


def most_in_flight(schedule):
    """Return the most forwards of each stage whose backward is not done, on one rank."""
    most = Counter()
    for row in schedule.rows:
        now = Counter()
        for instruction in row:
            if instruction.op == "F":
                now[instruction.stage] += 1
                most[instruction.stage] = max(most[instruction.stage], now[instruction.stage])
            elif instruction.op == "B":
                now[instruction.stage] -= 1
    return most


@pytest.mark.parametrize("num_ranks", range(1, 6))
@pytest.mark.parametrize("stages_per_rank", [1, 2, 3, 4])
def test_interleaved_stages_hold_the_microbatches_of_the_formula(num_ranks, stages_per_rank):
    taken = 0
    for num_microbatches in range(1, 25):
        for d in (1, 2, 3):
            groups = [tuple(range(first * d, (first + 1) * d)) for first in range(num_ranks)]
            layout = tuple(groups[stage % num_ranks] for stage in range(num_ranks * stages_per_rank))
            try:
                in_flight = most_in_flight(make("interleaved", ScheduleSpec(layout, num_microbatches)))
            except ScheduleError:  # rounds of different sizes
                continue
            taken += d == 1
            shares = {num_microbatches // d, -(-num_microbatches // d)} - {0}
            for stage, most in in_flight.items():
                assert most == max(in_flight_of_interleaved(stages_per_rank, num_ranks, m, stage) for m in shares)
    assert taken >= 4


def test_each_version_of_the_weights_has_its_casts():
    profile = chain(3)
    weights = [{}, {}]
    for casts in ({}, {name: spec.num_bytes({}) // 2 for name, spec in profile.graph.parameters.items()}):
        measurement = dataclasses.replace(profile.measurements[0], casts=casts)
        sums = ByteSums(Atoms(profile.graph, Cuts(profile.graph), measurement), 0.0)
        weights[bool(casts)] = [terms.weights for terms in sums.along([0, 1])]
    assert any(weights[0])
    assert weights[1] == [size * 3 // 2 for size in weights[0]]
