"""The search over the bottleneck T for replicated stages: which T to try with the solver, until the best plan is known.

Objectives, where tau_k is stage k's share of the period (``solver.stage``)::

    asynchronous   min max_k tau_k                              ``asynchronous``: bisection of T
    flush          min (m - 1) max_k tau_k + sum_k tau_k        ``flush``: branch and bound over intervals of T

For the flush, let v(T) be the least sum with every tau <= T. v does not increase with T, so every plan whose bottleneck
is in an interval (low, high] costs at least (m - 1) low + v(high). Intervals that cannot contain the best plan are
dropped, and the others are halved. With tolerance 0, the result is optimal.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopipe.planning.search import solver
from autopipe.planning.search.probes import least_ranks, least_sum

Row = tuple[int, int, int, int]
"""A stage: atoms i..j-1 on r ranks, with d ranks behind it: (i, j, r, d)."""
CLOSE = 1e-9


@dataclass(frozen=True)
class Arrays:
    """The arguments of the solver."""

    tables: tuple[Any, ...]  # arrays of shape (n + 1, n + 1), in the order of ``solver``
    place: Any  # the placement tables
    rules: solver.Rules  # the list of rules
    replica_choices: Any  # the allowed numbers of replicas
    top_speed: float  # of the fastest rank

    @property
    def num_atoms(self) -> int:
        """The number of atoms."""
        return int(self.tables[0].shape[0]) - 1

    @property
    def num_ranks(self) -> int:
        """The number of ranks that may be used."""
        return int(self.rules[solver.RANKS])

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a minibatch."""
        return int(self.rules[solver.MICROBATCHES])

    @property
    def equal(self) -> bool:
        """Whether all devices and links are equal."""
        return bool(self.rules[solver.EQUAL] > 0)

    def stage(self, row: Row) -> tuple[float, str]:
        """Return (tau, recompute mode) of a stage."""
        i, j, r, d = row
        tau, mode = solver.stage(self.tables, self.place, self.rules, i, j, r, d)
        return tau, solver.MODES[mode]


def objective(arrays: Arrays, rows: list[Row]) -> float:
    """Return the value that the search minimizes, in seconds of a minibatch."""
    taus, m = [arrays.stage(row)[0] for row in rows], arrays.num_microbatches
    if arrays.rules[solver.FLUSH] > 0:
        return (m - 1) * max(taus) + math.fsum(taus)
    return m * max(taus)


def asynchronous(arrays: Arrays) -> list[Row] | None:
    """Return the stages with the least bottleneck, or None if no stages fit."""
    every = len(arrays.replica_choices) == int(arrays.rules[solver.MOST])
    probe = _FewestRanks(arrays) if arrays.equal and every else _LeastSum(arrays)
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
            if best is None and math.inf == T:
                return None
        if best is None:
            T = T * 1.5 if refused < 8 else math.inf
        elif refused == 2:
            T = high * (1 - CLOSE)
        else:
            T = math.sqrt(low * high) if low else high / 2
    return best


def flush(arrays: Arrays, tolerance: float = 0.0) -> list[Row] | None:
    """Return the stages with the least (m - 1) max tau + sum tau, within ``tolerance``, or None if none fit."""
    start = asynchronous(arrays)
    if start is None:
        return None
    m = arrays.num_microbatches

    best, cost = start, objective(arrays, start)
    least_T = max(arrays.stage(row)[0] for row in start) * (1 - 2 * CLOSE)
    probe = _LeastSum(arrays)
    least_sum = float(arrays.tables[0][0, arrays.num_atoms]) / arrays.top_speed / arrays.num_ranks
    top = (cost - least_sum) / (m - 1) if m > 1 else 4 * cost
    order = itertools.count()
    intervals = [((m - 1) * least_T + least_sum, next(order), least_T, top, least_sum, False)]
    while intervals:
        bound, _, low, high, known_sum, probed = heapq.heappop(intervals)
        if bound >= cost * (1 - tolerance) * (1 - 1e-12):
            break
        if high <= low * (1 + CLOSE):
            continue
        # the upper end first, because it bounds the interval; then the middle
        T = high if not probed else math.sqrt(low * high)
        rows = probe.rows(T)
        if rows is None:
            if probed:
                heapq.heappush(intervals, ((m - 1) * T + known_sum, next(order), T, high, known_sum, True))
            continue
        taus = [arrays.stage(row)[0] for row in rows]
        worst, total = max(taus), math.fsum(taus)
        if (m - 1) * worst + total < cost:
            best, cost = rows, (m - 1) * worst + total
        below = worst * (1 - CLOSE)
        heapq.heappush(intervals, ((m - 1) * low + total, next(order), low, below, total, True))
        if probed and total > known_sum * (1 + 1e-15):
            heapq.heappush(intervals, ((m - 1) * T + known_sum, next(order), T, high, known_sum, True))
    return best


class _FewestRanks:
    """Probes a bottleneck with ``least_ranks``."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.g = np.zeros(arrays.num_atoms + 1, dtype=np.int64)

    def rows(self, T: float) -> list[Row] | None:
        """Return the stages with every tau <= T on the fewest ranks, or None if there are not enough ranks.

        Of several such plans, it is the one whose stages end earliest, whatever was probed before.
        """
        a, g = self.arrays, self.g
        if least_ranks(a.tables, a.place, a.rules, T, g) > a.num_ranks:
            return None
        rows, i = [], 0
        while i < a.num_atoms:
            for j in range(i + 1, a.num_atoms + 1):  # pragma: no branch - one end always has them
                d, most = int(g[j]), int(g[i] - g[j])
                if (
                    1 <= most <= a.rules[solver.MOST]
                    and solver.least_replicas(a.tables, a.place, a.rules, i, j, d, most, T) == most
                ):
                    break
            rows.append((i, j, most, d))
            i = j
        return rows


class _LeastSum:
    """Probes a bottleneck with ``least_sum``."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.unit = int(arrays.rules[solver.UNIT])
        shape = (arrays.num_atoms + 1, arrays.num_ranks // self.unit + 1)
        self.h, self.choice = np.empty(shape), np.zeros((*shape, 2), dtype=np.int32)

    def rows(self, T: float) -> list[Row] | None:
        """Return the stages with the least sum of tau and every tau <= T. They use all ranks if ranks differ."""
        a = self.arrays
        least_sum(a.tables, a.place, a.rules, a.replica_choices, T, a.top_speed, self.h, self.choice)
        place = int(np.argmin(self.h[0])) if a.equal else -1
        d = place * self.unit if a.equal else a.num_ranks
        if self.h[0, place] >= math.inf:
            return None
        rows, i = [], 0
        while i < a.num_atoms:
            j, r = (int(x) for x in self.choice[i, d // self.unit])
            rows.append((i, j, r, d - r))
            i, d = j, d - r
        return rows
