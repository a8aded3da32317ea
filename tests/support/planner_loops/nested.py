"""PipeDream's nested placement, as loops.

They are the recursions written out: one stage after the other, in plain loops over numbers. The planner computes the
same values in array operations, and must return the same plans.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = Any


def dense_seconds(pointers: Array, supersets: Array, C: Array) -> Array:
    """Return V of the lowest level for every pair of nested states, infinity for the others."""
    n = len(C)
    V = np.full((n, n), math.inf)
    for i in range(n):
        if len(pointers) == 0:
            for j in range(i + 1, n):
                V[i, j] = C[j] - C[i]
        else:
            for q in range(pointers[i], pointers[i + 1]):
                V[i, supersets[q]] = C[supersets[q]] - C[i]
    return V


def first_stage(V: Array, P: Array, s: int, j: int, m: int, B: float, n_prev: int) -> float:
    """Return ``first`` by the formula of the module."""
    seconds: float = (V[s, j] + 4.0 * (m - 1) * (P[j] - P[s]) / (B * m) / n_prev) / m
    return seconds


def later_stage(V: Array, P: Array, X: Array, k: int, j: int, m: int, B: float) -> float:
    """Return ``later`` by the formula of the module."""
    cost: float = (V[k, j] + 4.0 * (m - 1) * (P[j] - P[k]) / (B * m)) / m
    cost = max(cost, 2.0 * X[k] / (B * m))
    if j < len(P) - 1:
        cost = max(cost, 2.0 * X[j] / (B * m))
    return cost


def fits(size: float, behind: int, used: int, limit: float) -> bool:
    """Return whether a stage of ``size`` bytes on ``used`` groups fits, with ``behind`` groups behind it."""
    return (behind + used - 1) // used * size <= limit


def last_below(C: Array, first: int, stop: int, limit: float) -> int:
    """Return the last of the states first..stop-1, sorted by seconds, with less than ``limit``; or first - 1."""
    while first < stop:
        middle = (first + stop) // 2
        if C[middle] < limit:
            first = middle + 1
        else:
            stop = middle
    return first - 1


def from_source(
    V: Array, C: Array, P: Array, X: Array, Z: Array, s: int, M: int, B: float, n_prev: int, ranks: int, bound: float,
    limit: float, back: Array, steps: Array,
) -> Array:  # fmt: skip
    """Return W_s(j, m) for all j and m <= M; values of ``bound`` and more may be left infinite. ``back``: (k, m').

    A cut k is tried only if the plain seconds on both sides of it, divided by the ranks there (``ranks`` per group),
    are below the best so far. ``steps``: the number of cuts tried, and its limit.
    """
    n = len(P)
    W = np.full((n, M + 1), math.inf)
    for j in range(s + 1, n):
        if V[s, j] >= math.inf or V[s, j] >= bound * M:
            continue
        if steps[0] > steps[1]:
            break
        if fits(Z[j] - Z[s], M - 1, 1, limit):
            W[j, 1] = first_stage(V, P, s, j, 1, B, n_prev)
        back[j, 1, 0], back[j, 1, 1] = s, 1
        for m in range(2, M + 1):
            best, cut, last = math.inf, s, m
            if fits(Z[j] - Z[s], M - m, m, limit):
                best = first_stage(V, P, s, j, m, B, n_prev)
            if W[j - 1, m] < math.inf and back[j - 1, m, 0] > s:
                # the cut of the state before is near the best one, and leaves few others to try
                k, used = back[j - 1, m, 0], back[j - 1, m, 1]
                if V[k, j] < math.inf and fits(Z[j] - Z[k], M - m, used, limit):
                    total = max(later_stage(V, P, X, k, j, used, B), W[k, m - used])
                    if total < best:
                        best, cut, last = total, k, used
            for used in range(1, m):
                roof = min(best, bound)
                k = last_below(C, s + 1, j, C[s] + roof * ranks * (m - used))
                steps[0] += 1
                while k > s and C[j] - C[k] < roof * ranks * used:
                    steps[0] += 1
                    if V[k, j] < roof * used and W[k, m - used] < roof and fits(Z[j] - Z[k], M - m, used, limit):
                        total = max(later_stage(V, P, X, k, j, used, B), W[k, m - used])
                        if total < best:
                            best, cut, last = total, k, used
                            roof = min(best, bound)
                    k -= 1
            W[j, m] = best
            back[j, m, 0], back[j, m, 1] = cut, last
    return W


def best_to_sink(
    V: Array, C: Array, P: Array, X: Array, Z: Array, S: Array, k: int, m: int, B: float, n_prev: int, ranks: int,
    first: bool, limit: float, steps: Array,
) -> float:  # fmt: skip
    """Return the best time of states k..end on m groups. S: of the stages behind a cut; ``first``: k is the source.

    Cuts and ``steps`` are as in ``from_source``.
    """
    end = len(P) - 1
    best = first_stage(V, P, k, end, m, B, n_prev) if first else later_stage(V, P, X, k, end, m, B)
    for used in range(1, m):
        j = last_below(C, k + 1, end, C[k] + best * ranks * used)
        steps[0] += 1
        while j > k and C[end] - C[j] < best * ranks * (m - used):
            steps[0] += 1
            if V[k, j] < best * used and S[j, m - used] < best and fits(Z[j] - Z[k], m - used, used, limit):
                head = first_stage(V, P, k, j, used, B, n_prev) if first else later_stage(V, P, X, k, j, used, B)
                best = min(best, max(head, S[j, m - used]))
            j -= 1
    return best


def to_sink(
    V: Array, C: Array, P: Array, X: Array, Z: Array, M: int, B: float, n_prev: int, ranks: int, limit: float,
    steps: Array,
) -> Array:  # fmt: skip
    """Return W_s(end, M) for every s, in one backward pass in which all s share the later stages S(k, m)."""
    n = len(P)
    S = np.full((n, M + 1), math.inf)
    result = np.full(n, math.inf)
    for k in range(n - 2, -1, -1):
        if V[k, n - 1] >= math.inf or steps[0] > steps[1]:
            continue
        S[k, 1] = later_stage(V, P, X, k, n - 1, 1, B)
        for m in range(2, M + 1):
            S[k, m] = best_to_sink(V, C, P, X, Z, S, k, m, B, n_prev, ranks, False, limit, steps)
        result[k] = best_to_sink(V, C, P, X, Z, S, k, M, B, n_prev, ranks, True, limit, steps)
    return result


def groups_for(seconds: float, group: float) -> int:
    """Return the number of groups for these seconds if each group takes at most ``group``."""
    return max(1, math.ceil(seconds / group - 1e-9))


def inner_values(
    V: Array, C: Array, P: Array, X: Array, Z: Array, M: int, B: float, n_prev: int, ranks: int, groups: int,
    known: float, limit: float, steps: Array,
) -> Array:  # fmt: skip
    """Return V of the next level. ``groups``: the members of that level; ``known``: the cost of a plan.

    Only pairs that a plan cheaper than ``known`` can use are computed; all of them if ``groups`` is 0.
    """
    n = len(P)
    result = np.full((n, n), math.inf)
    back = np.zeros((n, M + 1, 2), np.int32)
    W = from_source(
        V, C, P, X, Z, 0, M, B, n_prev, ranks, math.inf if groups == 0 else known * groups, limit, back, steps
    )
    result[0, :] = W[:, M]
    tails = to_sink(V, C, P, X, Z, M, B, n_prev, ranks, limit, steps)
    result[:, n - 1] = np.minimum(result[:, n - 1], tails)
    if groups == 2:
        return result
    for s in range(1, n - 1):
        bound = math.inf
        if groups > 0:
            # besides a middle piece, at least one group is for what is behind it, and enough for what is before it
            left = groups - groups_for(C[s], known * ranks * M) - 1
            if left < 1:
                continue
            bound = known * left
        if steps[0] > steps[1]:
            break
        W = from_source(V, C, P, X, Z, s, M, B, n_prev, ranks, bound, limit, back, steps)
        result[s, s + 1 : n - 1] = W[s + 1 : n - 1, M]
    return result


def walk(back: Array, n: int, M: int) -> Array:
    """Return the stages of ``from_source`` for 0..end on M groups, as rows (i, j, groups)."""
    rows = np.zeros((n, 3), np.int64)
    count, j, m = 0, n - 1, M
    while j > 0:
        k, used = back[j, m, 0], back[j, m, 1]
        rows[count, 0], rows[count, 1], rows[count, 2] = k, j, used
        count, j, m = count + 1, k, m - used
    return rows[:count][::-1].copy()
