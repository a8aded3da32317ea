"""The search over the bottleneck T for replicated stages: which T to try with the solver, until the best plan is known.

Objectives, where tau_k is stage k's share of the period (``solver.stage``)::

    asynchronous   min max_k tau_k                              ``asynchronous``: bisection of T
    flush          min (m - 1) max_k tau_k + sum_k tau_k        ``flush``: branch and bound over intervals of T

For the flush, let v(T) be the least sum with every tau <= T. v does not increase with T, so every plan whose bottleneck
is in an interval (low, high] costs at least (m - 1) low + v(high). Intervals that cannot contain the best plan are
dropped, and the others are halved. With tolerance 0, the result is optimal.

Two engines probe a T. Both work on rows or blocks of the tables.

- ``least_ranks`` (equal devices and links): the fewest ranks for atoms i.. with every tau <= T. Fewer ranks behind a
  stage are never worse, so one number per cut is enough for every G: O(n^2) per T.
- ``least_sum`` (any cluster, and every flush): the least sum of tau for atoms i.. on exactly d ranks with every
  tau <= T: O(n^2 G R) per T, with R allowed numbers of replicas. Nearly all of these (i, d) cannot be part of a plan,
  because the atoms from i on need more ranks than d, or those before more than the others.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopipe.planning.search import solver
from autopipe.planning.search.solver import Array, Rules

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


def least_ranks(tables: Any, place: Array, rules: Rules, T: float, g: Array) -> int:
    """Set g[i] to the fewest ranks for atoms i.. with every tau <= T; return g[0].

    The closed form gives lower bounds for all stages. Only stages whose bound is lower than the best count are
    evaluated exactly, in the order of their bounds.
    """
    n, G, cap = len(g) - 1, int(rules[solver.RANKS]), int(rules[solver.MOST])
    budget = T * place.item(solver.SPEED, 0, 0) * min(G, cap) * (1 + 1e-9)
    g[n] = 0
    bounds = _least_counts(tables[solver.TIME], tables[solver.RING] / rules[solver.MICROBATCHES], T)
    for i in range(n - 1, -1, -1):
        # seconds are not additive, because of input-only nodes, but they never decrease as j grows
        stop = int(tables[solver.COMPUTE][i, i + 1 :].searchsorted(budget, side="right"))
        behind = g[i + 1 : i + 1 + stop]
        counts = bounds[i, i + 1 : i + 1 + stop] + behind
        best = G + 1
        while stop:
            k = int(counts.argmin())
            if counts[k] >= best:
                break
            d, counts[k] = int(behind[k]), math.inf
            most = min(best - 1 - d, cap)
            r = solver.least_replicas(tables, place, rules, i, i + 1 + k, d, most, T)
            best = d + r if r <= most else best
        g[i] = best
    return int(g[0])


def _least_counts(t: Array, k: Array, T: float) -> Array:
    """Return lower bounds of the replicas of stages with these t and k: the closed form of ``solver``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        counts = np.where(k < T, np.ceil((t - k) / (T - k) - 1e-9), math.inf)
    return np.where(t <= T, 1.0, np.maximum(counts, 1.0))


def least_sum(
    tables: Any, place: Array, rules: Rules, replica_choices: Array, T: float, top_speed: float,
    h: Array, choice: Array,
) -> None:  # fmt: skip
    """Set h[i, d] to the least sum of tau of atoms i.. on exactly d ranks with every tau <= T; choice[i, d] to (j, r).

    Both are indexed by d in units, of which all ``replica_choices`` are multiples. Only (i, d) that can be part of a
    plan are computed. Of equally good stages, the one with the fewest replicas that ends first is chosen.
    """
    n, G, unit = h.shape[0] - 1, int(rules[solver.RANKS]), int(rules[solver.UNIT])
    seconds, most_seconds = tables[solver.COMPUTE], T * top_speed
    h[:] = math.inf
    h[n, 0] = 0.0
    needed = np.maximum(np.ceil(seconds[:, n] / most_seconds - 1e-9), 1)  # ranks, for the atoms from i on
    before = np.ceil(seconds[0] / most_seconds - 1e-9)
    before[1:] = np.maximum(before[1:], 1)
    before[0] = 0
    after = np.arange(n + 1)
    # by number of ranks behind a cut: the cuts that can have it; no others have a finite sum
    spans = [(n, n + 1)]
    for here in range(1, G // unit + 1):
        d = here * unit
        (cuts,) = np.nonzero((needed[:n] <= d) & (d <= G - before[:n]))
        if not len(cuts):
            spans.append((0, 0))
            continue
        first, last = int(cuts[0]), int(cuts[-1]) + 1
        best, ends = h[first:last, here], choice[first:last, here]
        for r in replica_choices.tolist():
            if r > d:
                break
            start, stop = spans[here - r // unit]
            # the stages that r ranks can compute in time: from ``top`` on, and up to ``stop``
            longest = most_seconds * r * (1 + 1e-9)
            start = max(start, first + 1)
            bottom = min(last, stop - 1)
            if start >= stop or first >= bottom:
                continue
            top = first + int(np.count_nonzero(seconds[first:bottom, start] > longest))
            stop = start + int(np.count_nonzero(seconds[bottom - 1, start:stop] <= longest))
            if top >= bottom or start >= stop:
                continue
            tau = solver.stages(tables, place, rules, slice(top, bottom), slice(start, stop), r, d - r)
            sums = np.where(tau <= T, tau + h[start:stop, here - r // unit], math.inf)
            sums[after[start:stop] <= after[top:bottom, None]] = math.inf
            j = sums.argmin(axis=1)
            least = sums[after[: bottom - top], j]
            (lower,) = np.nonzero(least < best[top - first : bottom - first])
            best[lower + top - first] = least[lower]
            ends[lower + top - first, 0], ends[lower + top - first, 1] = j[lower] + start, r
        (finite,) = np.nonzero(best < math.inf)
        spans.append((first + int(finite[0]), first + int(finite[-1]) + 1) if len(finite) else (0, 0))
