"""Plans with replicated stages: from a ``Problem`` to the solver's arrays, the search (``bottleneck``), and stages.

Contiguous placement assigns the stages to the ranks in order. Nested placement assigns one complete pipeline to each
group of an inner level of links, and the groups share the microbatches. The better one is kept.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from autopipe.ir.cluster import Cluster
from autopipe.planning.build import StageChoice
from autopipe.planning.cost.tables import Tables
from autopipe.planning.search import solver
from autopipe.planning.search.bottleneck import Arrays, Row, asynchronous, flush, objective
from autopipe.planning.search.problem import Problem

# up to this number of ranks that differ, each is placed on its own; more are placed in groups, to limit the search
MOST_PLACES = 128


def arrays_of(problem: Problem, width: int = 1) -> Arrays:
    """Return the solver's arrays for a problem. ``width``: the number of groups; the arrays are for one group."""
    tables, options, kind = problem.tables, problem.options, problem.kind
    memory = tables.memory
    cluster, G = problem.cluster, options.num_ranks // width
    equal = width == 1 and len(set(cluster.devices)) == 1 and cluster.levels_in_use(G) <= 1
    outer = cluster.span(0, options.num_ranks - 1)
    versions = kind.fixed_versions(problem.num_microbatches) or 0
    rules = np.zeros(solver.NUM_RULES)
    rules[solver.MICROBATCHES] = problem.num_microbatches
    rules[solver.RANKS] = G
    rules[solver.DEPTH] = kind.depth
    rules[solver.ALL] = {"depth": 0, "all": 1, "ranks": 2}[kind.in_flight]
    rules[solver.FLUSH] = kind.synchronous
    rules[solver.VERSIONS] = versions
    modes = problem.modes
    if not any(cluster.device(rank).memory_bytes for rank in range(options.num_ranks)):
        modes = modes[:1]  # the others are slower, and every stage fits
    rules[solver.MAY_KEEP] = "never" in modes
    rules[solver.MAY_BLOCK] = "block" in modes
    rules[solver.MAY_RECOMPUTE] = "stage" in modes
    rules[solver.EQUAL] = equal
    rules[solver.WIDTH] = width
    rules[solver.OUTER_SECONDS] = 1 / outer.ring_bandwidth
    rules[solver.OUTER_LATENCY] = outer.latency_seconds
    rules[solver.UNIT] = unit = 1 if equal else unit_of(G)
    # if ranks may stay unused, a stage has at most one replica per microbatch: more would be idle
    # (the same for very many ranks, to limit the search; plans for fewer ranks compete)
    most = min(G, max(problem.num_microbatches, unit)) if equal or unit > 1 else G
    rules[solver.MOST] = most
    rules[solver.SHARE] = options.sharded
    counts = range(1, most // unit + 1)
    choices = [r * unit for r in counts if options.replica_choices == "any" or r & (r - 1) == 0]
    place = placement(cluster, G, equal)
    return Arrays(
        (
            tables.forward_seconds + tables.backward_seconds,
            tables.forward_seconds,
            tables.received,
            tables.sent,
            memory.gradients,
            tables.tied_bytes,
            memory.weights,
            memory.fixed,
            memory.saved,
            memory.kept,
            *_one_replica(tables, place, exchanges=1 + options.sharded),
            *_by_block(problem, "block" in modes),
            *_optimizer_state(problem, "block" in modes),
        ),
        place,
        rules.tolist(),
        np.array(choices if options.may_replicate else [1], dtype=np.int64),
        max(cluster.device(rank).speed for rank in range(G)) * width,
    )


def _optimizer_state(problem: Problem, by_block: bool) -> tuple[Any, ...]:
    """Return O and its largest part, and g' and g'' without it if the replicas divide it."""
    memory = problem.tables.memory
    fixed, block = memory.fixed, _by_block(problem, by_block)[0]
    if problem.options.sharded:
        fixed, block = fixed - memory.optimizer, block - memory.optimizer
    return memory.optimizer, memory.largest, fixed, block


def _one_replica(tables: Tables, place: Any, exchanges: int) -> tuple[Any, Any]:
    """Return t without recompute, and 2 g / b_ring for each exchange, with the device and links of rank 0."""
    speed, _, into, into_latency, out, out_latency, ring, _ = place[:, 0, -1]
    time = (tables.forward_seconds + tables.backward_seconds) / speed
    time[1:] += tables.received[1:] * into + into_latency
    time[:, :-1] += tables.sent[:, :-1] * out + out_latency
    return time, 2 * exchanges * tables.memory.gradients * ring


def _by_block(problem: Problem, allowed: bool) -> tuple[Any, ...]:
    """Return the tables of recompute by block, or placeholders of the same shape."""
    memory = problem.tables.memory
    if not allowed:
        return (memory.weights,) * 4
    block = problem.block_tables
    return memory.gradients + memory.optimizer + block.unit, block.crossing, block.again_seconds, block.last_seconds


def unit_of(num_ranks: int) -> int:
    """Return the unit of replicas if ranks differ: 1, or more if there are more than ``MOST_PLACES`` ranks."""
    return next(unit for unit in range(-(-num_ranks // MOST_PLACES), num_ranks + 1) if num_ranks % unit == 0)


@functools.lru_cache(maxsize=32)
def placement(cluster: Cluster, num_ranks: int, equal: bool) -> Any:
    """Return the solver's placement tables, shape (8, G + 1, G + 1) in units, or (8, 1, 1) if all ranks are equal.

    A stage on several ranks has the lowest speed and the least memory of them. It receives over the narrowest link
    between its ranks and the rank before, sends likewise, and reduces over the narrowest link between its ranks.
    """
    if equal:
        table = np.zeros((8, 1, 1))
        table[:, 0, 0] = _one_placement(cluster, 0, num_ranks)
        return table
    unit = unit_of(num_ranks)
    count = num_ranks // unit
    table = np.zeros((8, count + 1, count + 1))
    for a in range(count):
        for r in range(1, count - a + 1):
            table[:, a, r] = _one_placement(cluster, a * unit, r * unit)
    return table


def _one_placement(cluster: Cluster, a: int, r: int) -> tuple[float, ...]:
    devices = [cluster.device(rank) for rank in (range(a, a + r) if len(cluster.devices) > 1 else (0,))]
    into, out = cluster.span(max(a - 1, 0), a + r - 1), cluster.span(a, min(a + r, cluster.num_ranks - 1))
    ring = cluster.span(a, a + r - 1)
    return (
        min(device.speed for device in devices),
        min(device.memory_bytes or math.inf for device in devices),
        1 / into.bandwidth,
        2 * into.latency_seconds,
        1 / out.bandwidth,
        2 * out.latency_seconds,
        1 / ring.ring_bandwidth,
        ring.latency_seconds,
    )


def solve(problem: Problem) -> list[StageChoice] | None:
    """Return the best stages for a problem, with replicas, or None if none fit.

    It tries contiguous placement, and nested placement in the groups of every inner level of links.
    """
    best: tuple[float, Arrays, list[Row]] | None = None
    for width in widths(problem):
        arrays = arrays_of(problem, width)
        rows = flush(arrays, problem.options.tolerance) if problem.kind.synchronous else asynchronous(arrays)
        if rows is not None and (best is None or objective(arrays, rows) < best[0]):
            best = objective(arrays, rows), arrays, rows
    if best is None:
        return None
    _, arrays, rows = best
    return [_choice(arrays, problem, row, rows) for row in rows]


def widths(problem: Problem) -> list[int]:
    """Return the numbers of groups to try: 1, and the number of groups of every inner level of links.

    Groups need equal devices. With one kind of link, they have no advantage.
    """
    cluster, G = problem.cluster, problem.options.num_ranks
    group_counts, size = [1], 1
    for level in cluster.levels[:-1]:
        size *= level.count
        if len(cluster.devices) == 1 and level.count > 1 and size < G and G % size == 0:
            group_counts.append(G // size)
    return sorted(set(group_counts))


def _choice(arrays: Arrays, problem: Problem, row: Row, rows: list[Row]) -> StageChoice:
    i, j, r, d = row
    tau, recompute = arrays.stage(row)
    in_flight, versions = solver.in_flight_and_versions(arrays.rules, r, d)
    first, group = sum(rows[0][2:]) - d - r, arrays.num_ranks
    width = int(arrays.rules[solver.WIDTH])
    # the replicas of one group are ``width`` apart, so that a microbatch stays in one group at every stage
    ranks = tuple(g * group + q for q in range(first, first + r) for g in range(width))
    edges = problem.tables.edges
    return StageChoice(edges[i], edges[j], ranks, recompute, int(in_flight), int(versions), tau * len(ranks))
