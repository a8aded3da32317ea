"""Plans with replicated stages: from a ``Problem`` to the solver's arrays, the search over the bottleneck T, and back.

Objectives, tau_k being stage k's share of the period (``solver.stage``)::

    asynchronous   min max_k tau_k                              ``asynchronous``: bisection of T
    flush          min (m - 1) max_k tau_k + sum_k tau_k        ``flush``: branch and bound over intervals of T

For the flush let v(T) be the least sum with every tau <= T. v does not rise with T, so every plan whose bottleneck lies
in an interval (low, high] costs at least (m - 1) low + v(high): intervals that cannot win are dropped, the others are
halved. With tolerance 0 nothing that is better remains.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopipe.ir.cluster import Cluster, Level
from autopipe.planning import solver
from autopipe.planning.build import StageChoice
from autopipe.planning.compiled import HAVE_NUMBA
from autopipe.planning.problem import Problem
from autopipe.planning.tables import Tables
from autopipe.planning.vectorized import least_ranks_by_rows

Row = tuple[int, int, int, int]
"""Atoms i..j-1 on r ranks with d behind: (i, j, r, d)."""
CLOSE = 1e-9
ANY = 1e200  # seconds: no bound at all


@dataclass(frozen=True)
class Arrays:
    """What the solver's loops take."""

    tables: tuple[Any, ...]
    place: Any
    rules: Any
    replica_choices: Any
    top_speed: float

    @property
    def num_atoms(self) -> int:
        """How many atoms."""
        return int(self.tables[0].shape[0]) - 1

    @property
    def num_ranks(self) -> int:
        """How many ranks may be used."""
        return int(self.rules[solver.RANKS])

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a minibatch."""
        return int(self.rules[solver.MICROBATCHES])

    @property
    def equal(self) -> bool:
        """Whether all devices and links are equal."""
        return bool(self.rules[solver.EQUAL] > 0)

    def stage(self, row: Row) -> tuple[float, bool]:
        """Return (tau, recompute) of a stage."""
        i, j, r, d = row
        tau, again = solver.stage(self.tables, self.place, self.rules, i, j, r, d)
        return float(tau), bool(again)


def arrays_of(problem: Problem, width: int = 1) -> Arrays:
    """Return the solver's arrays for a problem; with ``width`` groups, those of the pipeline that each group runs."""
    tables, options, needs = problem.tables, problem.options, problem.needs
    cluster, G = problem.cluster, options.num_ranks // width
    equal = width == 1 and len(set(cluster.devices)) == 1 and _levels_in_use(cluster, G) <= 1
    outer = _span(cluster, 0, options.num_ranks - 1)
    versions = needs.weight_versions if isinstance(needs.weight_versions, int) else 0
    rules = np.zeros(solver.NUM_RULES)
    rules[solver.MICROBATCHES] = problem.num_microbatches
    rules[solver.RANKS] = G
    rules[solver.EXTRA] = needs.extra_in_flight
    rules[solver.ALL] = needs.in_flight == "all"
    rules[solver.FLUSH] = needs.flush
    rules[solver.VERSIONS] = versions
    rules[solver.MAY_KEEP] = options.recompute != "always"
    rules[solver.MAY_RECOMPUTE] = options.recompute != "never"
    rules[solver.EQUAL] = equal
    rules[solver.WIDTH] = width
    rules[solver.OUTER_SECONDS] = 1 / outer.bandwidth
    rules[solver.OUTER_LATENCY] = outer.latency_seconds
    choices = [r for r in range(1, G + 1) if options.replica_choices == "any" or r & (r - 1) == 0]
    place = placement(cluster, G, equal)
    return Arrays(
        (
            tables.forward_seconds + tables.backward_seconds,
            tables.forward_seconds,
            tables.received,
            tables.sent,
            tables.gradient_bytes,
            tables.tied_bytes,
            tables.weight_bytes,
            tables.gradient_bytes + problem.profile.optimizer_bytes_per_byte * tables.stepped_bytes,
            tables.saved_bytes,
            tables.kept_bytes,
            *_one_replica(tables, place),
        ),
        place,
        rules,
        np.array([1] if options.straight else choices, dtype=np.int64),
        max(cluster.device(rank).speed for rank in range(G)) * width,
    )


def _one_replica(tables: Tables, place: Any) -> tuple[Any, Any]:
    """Return t without recompute and 2 g / b_ring, for devices and links as those of rank 0."""
    speed, _, into, into_latency, out, out_latency, ring, _ = place[:, 0, -1]
    time = (tables.forward_seconds + tables.backward_seconds) / speed
    time[1:] += tables.received[1:] * into + into_latency
    time[:, :-1] += tables.sent[:, :-1] * out + out_latency
    return time, 2 * tables.gradient_bytes * ring


def _levels_in_use(cluster: Cluster, num_ranks: int) -> int:
    width, used = 1, 0
    for level in cluster.levels:
        used += level.count > 1 and width < num_ranks
        width *= level.count
    return used


def placement(cluster: Cluster, num_ranks: int, equal: bool) -> Any:
    """Return the solver's placement tables, shape (8, G + 1, G + 1), or (8, 1, 1) where all ranks are equal.

    A stage on several ranks runs at the speed and with the memory of the least of them. It receives over the narrowest
    link between its ranks and the one before, sends likewise, and reduces over the narrowest link between its ranks.
    """
    if equal:
        table = np.zeros((8, 1, 1))
        table[:, 0, 0] = _one_placement(cluster, 0, num_ranks)
        return table
    table = np.zeros((8, num_ranks + 1, num_ranks + 1))
    for a in range(num_ranks):
        for r in range(1, num_ranks - a + 1):
            table[:, a, r] = _one_placement(cluster, a, r)
    return table


def _one_placement(cluster: Cluster, a: int, r: int) -> tuple[float, ...]:
    devices = [cluster.device(rank) for rank in (range(a, a + r) if len(cluster.devices) > 1 else (0,))]
    into, out = _span(cluster, max(a - 1, 0), a + r - 1), _span(cluster, a, min(a + r, cluster.num_ranks - 1))
    ring = _span(cluster, a, a + r - 1)
    return (
        min(device.speed for device in devices),
        min(device.memory_bytes or solver.HUGE for device in devices),
        1 / into.bandwidth,
        2 * into.latency_seconds,
        1 / out.bandwidth,
        2 * out.latency_seconds,
        1 / ring.bandwidth,
        ring.latency_seconds,
    )


def _span(cluster: Cluster, first: int, last: int) -> Level:
    """Return the narrowest level that a message between two of these ranks may pass."""
    link = cluster.link(first, last)
    levels = cluster.levels[: cluster.levels.index(link) + 1]
    used = [level for level in levels if level.count > 1] or [link]
    return Level("", 1, min(x.bandwidth for x in used), max(x.latency_seconds for x in used))


def solve(problem: Problem) -> list[StageChoice] | None:
    """Return the best stages for a problem, replicas allowed, or None when nothing fits.

    Contiguous placement, and nested placement in groups of every inner level of links; the better is kept.
    """
    best: tuple[float, Arrays, list[Row]] | None = None
    for width in widths(problem):
        arrays = arrays_of(problem, width)
        rows = flush(arrays, problem.options.tolerance) if problem.needs.flush else asynchronous(arrays)
        if rows is not None and (best is None or objective(arrays, rows) < best[0]):
            best = objective(arrays, rows), arrays, rows
    if best is None:
        return None
    _, arrays, rows = best
    return [_choice(arrays, problem, row, rows) for row in rows]


def widths(problem: Problem) -> list[int]:
    """Return the numbers of groups to try: 1, and for every inner level of links the groups that it divides ranks into.

    Groups are equal only where all devices are; behind one kind of link they bring nothing.
    """
    cluster, G = problem.cluster, problem.options.num_ranks
    found, size = [1], 1
    for level in cluster.levels[:-1]:
        size *= level.count
        if len(cluster.devices) == 1 and level.count > 1 and size < G and G % size == 0:
            found.append(G // size)
    return sorted(set(found))


def objective(arrays: Arrays, rows: list[Row]) -> float:
    """Return what the search minimises, in seconds of a minibatch."""
    taus, m = [arrays.stage(row)[0] for row in rows], arrays.num_microbatches
    if arrays.rules[solver.FLUSH] > 0:
        return (m - 1) * max(taus) + math.fsum(taus)
    return m * max(taus)


def _choice(arrays: Arrays, problem: Problem, row: Row, rows: list[Row]) -> StageChoice:
    i, j, r, d = row
    tau, recompute = arrays.stage(row)
    held, versions = solver.held_and_versions(arrays.rules, r, d)
    first, group = sum(rows[0][2:]) - d - r, arrays.num_ranks
    width = int(arrays.rules[solver.WIDTH])
    # replicas of one group are ``width`` apart, so that a microbatch meets the same group at every stage
    ranks = tuple(g * group + q for q in range(first, first + r) for g in range(width))
    edges = problem.tables.edges
    return StageChoice(edges[i], edges[j], ranks, recompute, int(held), int(versions), tau * len(ranks))


def asynchronous(arrays: Arrays) -> list[Row] | None:
    """Return the stages with the least bottleneck, or None when nothing fits."""
    probe = _Fewest(arrays) if arrays.equal and len(arrays.replica_choices) == arrays.num_ranks else _Sums(arrays)
    n = arrays.num_atoms
    low, high = float(arrays.tables[0][0, n]) / arrays.top_speed / arrays.num_ranks, math.inf
    best: list[Row] | None = None
    T, refused = low * 1.1 or 1e-12, 0
    while high > low * (1 + 2 * CLOSE):
        rows = probe.rows(T)
        if rows is not None:
            best, high, refused = rows, max(arrays.stage(row)[0] for row in rows), 0
        else:
            low, refused = T, refused + 1
            if best is None and T >= ANY:
                return None
        if best is None:
            T = T * 1.5 if refused < 8 else ANY
        elif refused == 2:
            T = high * (1 - CLOSE)
        else:
            T = math.sqrt(low * high) if low else high / 2
    return best


def flush(arrays: Arrays, tolerance: float = 0.0) -> list[Row] | None:
    """Return the stages with the least (m - 1) max tau + sum tau, within ``tolerance``; None when nothing fits."""
    start = asynchronous(arrays)
    if start is None:
        return None
    m = arrays.num_microbatches

    best, cost = start, objective(arrays, start)
    least_T = max(arrays.stage(row)[0] for row in start) * (1 - 2 * CLOSE)
    probe = _Sums(arrays)
    least_sum = float(arrays.tables[0][0, arrays.num_atoms]) / arrays.top_speed / arrays.num_ranks
    top = (cost - least_sum) / (m - 1) if m > 1 else 4 * cost
    order = itertools.count()
    intervals = [((m - 1) * least_T + least_sum, next(order), least_T, top, least_sum, False)]
    while intervals:
        bound, _, low, high, known_sum, asked = heapq.heappop(intervals)
        if bound >= cost * (1 - tolerance) * (1 - 1e-12):
            break
        if high <= low * (1 + CLOSE):
            continue
        # the upper end first: it bounds the whole interval; then the middle
        T = high if not asked else math.sqrt(low * high)
        rows = probe.rows(T)
        if rows is None:
            if asked:
                heapq.heappush(intervals, ((m - 1) * T + known_sum, next(order), T, high, known_sum, True))
            continue
        taus = [arrays.stage(row)[0] for row in rows]
        worst, total = max(taus), math.fsum(taus)
        if (m - 1) * worst + total < cost:
            best, cost = rows, (m - 1) * worst + total
        below = worst * (1 - CLOSE)
        heapq.heappush(intervals, ((m - 1) * low + total, next(order), low, below, total, True))
        if asked and total > known_sum * (1 + 1e-15):
            heapq.heappush(intervals, ((m - 1) * T + known_sum, next(order), T, high, known_sum, True))
    return best


class _Fewest:
    """Asks ``least_ranks``."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.g = np.zeros(arrays.num_atoms + 1, dtype=np.int64)
        self.run = solver.least_ranks if HAVE_NUMBA else least_ranks_by_rows

    def rows(self, T: float) -> list[Row] | None:
        """Return stages with every tau <= T on as few ranks as can be, or None when the ranks do not suffice.

        Of several such plans the one whose stages end earliest, whatever was asked before.
        """
        a, g = self.arrays, self.g
        if self.run(a.tables, a.place, a.rules, T, g) > a.num_ranks:
            return None
        rows, i = [], 0
        while i < a.num_atoms:
            for j in range(i + 1, a.num_atoms + 1):
                d, most = int(g[j]), int(g[i] - g[j])
                if most >= 1 and solver.least_replicas(a.tables, a.place, a.rules, i, j, d, most, T) == most:
                    break
            rows.append((i, j, most, d))
            i = j
        return rows


class _Sums:
    """Asks ``least_sum``."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        shape = (arrays.num_atoms + 1, arrays.num_ranks + 1)
        self.h, self.choice = np.empty(shape), np.zeros((*shape, 2), dtype=np.int32)

    def rows(self, T: float) -> list[Row] | None:
        """Return the stages with the least sum of tau, every tau <= T; all ranks where they differ."""
        a = self.arrays
        solver.least_sum(a.tables, a.place, a.rules, a.replica_choices, T, a.top_speed, self.h, self.choice)
        d = int(np.argmin(self.h[0])) if a.equal else a.num_ranks
        if self.h[0, d] >= solver.HUGE:
            return None
        rows, i = [], 0
        while i < a.num_atoms:
            j, r = (int(x) for x in self.choice[i, d])
            rows.append((i, j, r, d - r))
            i, d = j, d - r
        return rows
