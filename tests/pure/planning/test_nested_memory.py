"""Nested placement under a memory limit: small chains against brute force, and published cases by command."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from support.pipedream_cases import random_layers

from benchmarks.pipedream import model as pipedream_model
from benchmarks.pipedream.file_format import LayerGraph
from benchmarks.pipedream.model import Machine, plan_layers


def chain(rng: random.Random, count: int) -> LayerGraph:
    graph = random_layers(rng, count)
    edges = tuple(itertools.pairwise(range(count)))
    return LayerGraph(
        graph.names,
        graph.descriptions,
        graph.forward_seconds,
        graph.backward_seconds,
        graph.activation_bytes,
        graph.parameter_bytes,
        edges,
    )


def best_nested(graph: LayerGraph, machine: Machine) -> float:
    """Evaluate PipeDream's recursion over all cuts and counts, with its memory rule at every level."""
    n, limit = len(graph.names), machine.memory_bytes or math.inf

    def sums(values, i, j):
        return math.fsum(values[i:j])

    value = {
        (i, j): sums(graph.forward_seconds, i, j) + sums(graph.backward_seconds, i, j)
        for i, j in itertools.combinations(range(n + 1), 2)
    }
    below = 1
    for count, bandwidth in zip(machine.counts, machine.bandwidths, strict=True):
        value = next_level(graph, value, count, bandwidth, below, limit)
        below = count
    return value[0, n]


def next_level(graph, value, count, bandwidth, below, limit):
    n = len(graph.names)

    def room(i, j, behind, used):
        size = math.fsum(graph.activation_bytes[i:j]) + math.fsum(graph.parameter_bytes[i:j])
        return math.ceil(behind / used) * size <= limit

    def shared(i, j, used, divisor):
        parameters = math.fsum(graph.parameter_bytes[i:j])
        return (value[i, j] + 4 * (used - 1) * parameters / (bandwidth * used) / divisor) / used

    def crossing(k, used):
        return 2 * graph.activation_bytes[k - 1] / (bandwidth * used)

    def best(start, j, m):
        """Return the best plan of layers start..j on exactly m groups, with ``count - m`` groups behind."""
        shortest = shared(start, j, m, below) if room(start, j, count - m, m) else math.inf
        for k in range(start + 1, j):
            for used in range(1, m):
                if room(k, j, count - m, used):
                    last = max(shared(k, j, used, 1), crossing(k, used), 0 if j == n else crossing(j, used))
                    shortest = min(shortest, max(last, best(start, k, m - used)))
        return shortest

    return {(i, j): best(i, j, count) for i, j in value}


@pytest.mark.parametrize("seed", range(60))
def test_a_nested_plan_under_a_memory_limit_is_optimal(seed):
    rng = random.Random(seed)
    graph = chain(rng, rng.randrange(2, 6))
    total = math.fsum(graph.activation_bytes) + math.fsum(graph.parameter_bytes)
    bandwidth = 10 ** rng.uniform(-1, 2)
    counts = rng.choice([(2, 2), (3, 2), (2, 3), (3, 3), (2, 2, 2)])
    bandwidths = tuple(bandwidth / 4**level for level in range(len(counts)))
    machine = Machine(counts, bandwidths, total * rng.uniform(0.2, 2))
    search = pipedream_model._Search(graph, machine, straight=False)
    (states,) = search.spaces()
    expected = best_nested(graph, machine)
    best, finished = search.nested(states, math.inf)
    assert finished
    if math.isinf(expected):
        assert best is None
        return
    assert best is not None
    assert best.cost_seconds == pytest.approx(expected, rel=1e-8)
    assert plan_layers(graph, machine).cost_seconds <= expected * (1 + 1e-8)
