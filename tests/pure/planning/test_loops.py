"""The array operations of the planner return what the plain loops of ``support.planner_loops`` return."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.pipedream_cases import random_layers
from support.planner_loops import nested as nested_loops
from support.planner_loops import placed as placed_loops
from support.planner_loops import replicated as replicated_loops
from support.planning_cases import replicated_case

from autopipe.errors import PlanError
from autopipe.ir.artifact import canonical
from autopipe.planning import make_plan
from autopipe.planning.search import bottleneck
from benchmarks.pipedream import model
from benchmarks.pipedream.file_format import LayerGraph
from benchmarks.pipedream.flat import FlatSearch
from benchmarks.pipedream.placed import PlacedSearch
from benchmarks.pipedream.states import States

MACHINES = [(1,), (3,), (4,), (7,), (2, 2), (3, 2), (2, 3), (3, 3), (1, 2), (2, 1), (2, 2, 2), (2, 2, 3)]


def case(seed: int) -> tuple[LayerGraph, model.Machine, bool]:
    """Return layers, a chain in half of the cases, a machine, and whether stages have one device.

    Some layers take no time, and some devices little memory.
    """
    rng = random.Random(seed)
    graph = random_layers(rng, rng.randrange(1, 9))
    if rng.random() < 0.3:
        free = (False, *(rng.random() < 0.5 for _ in graph.names[1:]))
        forward, backward = (
            tuple(0.0 if skip else seconds for skip, seconds in zip(free, times, strict=True))
            for times in (graph.forward_seconds, graph.backward_seconds)
        )
        graph = dataclasses.replace(graph, forward_seconds=forward, backward_seconds=backward)
    if rng.random() < 0.5:
        graph = dataclasses.replace(graph, edges=tuple(itertools.pairwise(range(len(graph.names)))))
    counts, bandwidth = rng.choice(MACHINES), 10 ** rng.uniform(-1, 2)
    size = math.fsum(graph.activation_bytes) + math.fsum(graph.parameter_bytes)
    memory = rng.choice((0, size * rng.uniform(0.2, 2)))
    machine = model.Machine(counts, tuple(bandwidth / 4**level for level in range(len(counts))), memory)
    return graph, machine, rng.random() < 0.2


def arrays(states: States) -> tuple:
    return (
        states.pointers,
        states.supersets,
        states.seconds,
        states.parameters,
        states.activations,
        states.crossing,
    )


def flat_by_loops(search: model._Search, states: States, known: float) -> tuple[float, list[tuple[int, int, int]]]:
    machine = search.machine
    cost, after, replicas = placed_loops.solve_flat(
        *arrays(states), machine.bandwidths[0], machine.num_devices, search.limit, search.straight, known
    )
    stages, i = [], 0
    while cost < math.inf and i < states.count - 1:
        stages.append((i, int(after[i]), int(replicas[i])))
        i = int(after[i])
    return float(cost), stages


def placed_by_loops(search: model._Search, states: States, known: float) -> tuple[float, list[tuple[int, int, int]]]:
    machine = search.machine
    widths = np.cumprod((1, *machine.counts))
    steps = np.array([0, 2**62])
    cost, rows = placed_loops.solve_contiguous(
        *arrays(states), widths, np.array(machine.bandwidths), machine.num_devices, search.limit, search.straight,
        known, steps,
    )  # fmt: skip
    return float(cost), [(int(i), int(j), int(r)) for i, j, _, r in rows]


def nested_by_loops(search: model._Search, states: States, known: float) -> float:
    counts, bandwidths, n = search.machine.counts, search.machine.bandwidths, states.count
    order = np.argsort(np.round(states.seconds / states.seconds[-1], 12), kind="stable")
    C, P, X = states.seconds[order], states.parameters[order], states.crossing[order]
    Z, steps = P + states.activations[order], np.array([0, 2**62])
    V = nested_loops.dense_seconds(states.pointers, states.supersets, states.seconds)[np.ix_(order, order)]
    below, ranks = 1, 1
    for level, (count, bandwidth) in enumerate(zip(counts[:-1], bandwidths, strict=False)):
        groups = counts[-1] if level == len(counts) - 2 and known < math.inf else 0
        V = nested_loops.inner_values(V, C, P, X, Z, count, bandwidth, below, ranks, groups, known, search.limit, steps)
        ranks, below = ranks * count, count
    back = np.zeros((n, counts[-1] + 1, 2), np.int32)
    W = nested_loops.from_source(
        V, C, P, X, Z, 0, counts[-1], bandwidths[-1], below, ranks, math.inf, search.limit, back, steps
    )
    return float(W[n - 1, counts[-1]])


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("block", range(4))
def test_pipedreams_formulas_are_searched_as_by_loops(block):
    for seed in range(block * 40, block * 40 + 40):
        graph, machine, straight = case(seed)
        search = model._Search(graph, model._without_trivial_levels(machine), straight)
        machine = search.machine
        for states in search.spaces():
            for known in (math.inf, float(states.seconds[-1]) * 0.6):
                if len(machine.counts) == 1:
                    flat = FlatSearch(states, machine.bandwidths[0], search.limit, straight)
                    assert flat.solve(machine.num_devices, known) == flat_by_loops(search, states, known), seed
                    continue
                widths = tuple(int(width) for width in np.cumprod((1, *machine.counts)))
                placed = PlacedSearch(states, widths, machine.bandwidths, machine.num_devices, straight)
                steps = [0, 2**62]
                assert placed.solve(search.limit, known, steps) == placed_by_loops(search, states, known), seed
                plan, finished = search.nested(states, known)
                least = nested_by_loops(search, states, known)
                assert finished
                assert (plan.cost_seconds if plan else math.inf) == (least if least < known else math.inf), seed


def planned(seed: int) -> str:
    try:
        return canonical(make_plan(*replicated_case(seed)))
    except PlanError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:divide by zero")
@pytest.mark.parametrize("block", range(4))
def test_replicas_are_searched_as_by_loops(block, monkeypatch):
    seeds = range(block * 30, block * 30 + 30)
    plans = [planned(seed) for seed in seeds]
    monkeypatch.setattr(bottleneck, "least_ranks", replicated_loops.least_ranks)
    monkeypatch.setattr(bottleneck, "least_sum", replicated_loops.least_sum)
    assert plans == [planned(seed) for seed in seeds]
    assert sum(plan.startswith("{") for plan in plans) > 10


def printed_plans(hash_seed: str) -> str:
    code = (
        "from pure.planning.test_loops import case, planned\n"
        "from benchmarks.pipedream import model\n"
        "for seed in range(100):\n"
        "    graph, machine, straight = case(seed)\n"
        "    print(model.plan_layers(graph, machine, straight=straight))\n"
        "    print(planned(seed))\n"
    )
    folder = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(folder.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout


def test_plans_do_not_depend_on_the_hash_seed():
    plans = printed_plans("0")
    assert plans == printed_plans("7")
    assert len(plans) > 50_000
