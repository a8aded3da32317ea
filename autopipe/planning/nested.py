"""PipeDream's nested placement: level k + 1 treats a whole group of level k as one device. The loops.

With V(i, j) the best time of states i..j inside one group (the plain seconds at the lowest level) and M groups::

    first(s, j, m)   = (V(s, j) + 4 (m-1) P / (B m) / n_prev) / m             n_prev: groups of the level below
    later(k, j, m)   = max((V(k, j) + 4 (m-1) P / (B m)) / m, 2 X_k / (B m), 2 X_j / (B m) unless j is the end)
    W_s(j, m)        = min(first(s, j, m), min over k, m' of max(W_s(k, m - m'), later(k, j, m')))

and V of the next level is W_i(j, M). Contiguous placement cannot express all of these plans, nor they its own; the
better of both is kept. Of the last level only W_0 is needed, so of the level below only the pieces that can be part of
a plan cheaper than ``known``; with two groups these are heads and tails, which one pass in each direction gives.

Source: PipeDream, ``optimizer_graph_hierarchical.py`` (``compute_partitioning``).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autopipe.planning.compiled import compiled

Array = Any  # arrays inside compiled code: numba infers the type
HUGE = 1e300


@compiled
def dense_seconds(pointers: Array, supersets: Array, C: Array) -> Array:
    """Return V of the lowest level for every pair of nested states, HUGE for the others."""
    n = len(C)
    V = np.full((n, n), HUGE)
    for i in range(n):
        if len(pointers) == 0:
            for j in range(i + 1, n):
                V[i, j] = C[j] - C[i]
        else:
            for q in range(pointers[i], pointers[i + 1]):
                V[i, supersets[q]] = C[supersets[q]] - C[i]
    return V


@compiled
def first_stage(V: Array, P: Array, s: int, j: int, m: int, B: float, n_prev: int) -> float:
    """Return ``first`` of the module's formula."""
    seconds: float = (V[s, j] + 4.0 * (m - 1) * (P[j] - P[s]) / (B * m) / n_prev) / m
    return seconds


@compiled
def later_stage(V: Array, P: Array, X: Array, k: int, j: int, m: int, B: float) -> float:
    """Return ``later`` of the module's formula."""
    cost: float = (V[k, j] + 4.0 * (m - 1) * (P[j] - P[k]) / (B * m)) / m
    cost = max(cost, 2.0 * X[k] / (B * m))
    if j < len(P) - 1:
        cost = max(cost, 2.0 * X[j] / (B * m))
    return cost


@compiled
def from_source(
    V: Array, P: Array, X: Array, s: int, M: int, B: float, n_prev: int, bound: float, back: Array
) -> Array:
    """Return W_s(j, m) for all j and m <= M; values of ``bound`` and more may be left at HUGE. ``back``: (k, m')."""
    n = len(P)
    W = np.full((n, M + 1), HUGE)
    for j in range(s + 1, n):
        if V[s, j] >= HUGE or V[s, j] >= bound * M:
            continue
        for m in range(1, M + 1):
            W[j, m] = first_stage(V, P, s, j, m, B, n_prev)
            back[j, m, 0], back[j, m, 1] = s, m
        for k in range(j - 1, s, -1):
            v = V[k, j]
            if v >= HUGE or V[s, k] >= HUGE:
                continue
            roof = min(bound, W[j, 2:].max())
            if v >= roof * (M - 1):
                continue
            for used in range(1, M):
                if v / used >= roof:
                    continue
                cost = later_stage(V, P, X, k, j, used, B)
                for m in range(used + 1, M + 1):
                    total = max(cost, W[k, m - used])
                    if total < W[j, m]:
                        W[j, m] = total
                        back[j, m, 0], back[j, m, 1] = k, used
    return W


@compiled
def to_sink(V: Array, P: Array, X: Array, M: int, B: float, n_prev: int) -> Array:
    """Return W_s(end, M) for every s: one pass backwards, sharing the later stages S(k, m) among all s."""
    n = len(P)
    S = np.full((n, M + 1), HUGE)
    result = np.full(n, HUGE)
    for k in range(n - 2, -1, -1):
        for m in range(1, M + 1):
            if V[k, n - 1] < HUGE:
                S[k, m] = later_stage(V, P, X, k, n - 1, m, B)
        if V[k, n - 1] < HUGE:
            result[k] = first_stage(V, P, k, n - 1, M, B, n_prev)
        for j in range(k + 1, n - 1):
            v = V[k, j]
            if v >= HUGE:
                continue
            roof = max(result[k], S[k, 2:].max())
            if v >= roof * (M - 1):
                continue
            for used in range(1, M):
                head = first_stage(V, P, k, j, used, B, n_prev)
                result[k] = min(result[k], max(head, S[j, M - used]))
                if v / used >= roof:
                    continue
                cost = later_stage(V, P, X, k, j, used, B)
                for m in range(used + 1, M + 1):
                    S[k, m] = min(S[k, m], max(cost, S[j, m - used]))
    return result


@compiled
def groups_for(seconds: float, group: float) -> int:
    """Return the groups that so many seconds need when each group takes at most ``group``."""
    return max(1, math.ceil(seconds / group - 1e-9))


@compiled
def inner_values(
    V: Array, C: Array, P: Array, X: Array, M: int, B: float, n_prev: int, groups: int, ranks: int, known: float
) -> Array:
    """Return V of the next level. ``groups``: members of that level, ``ranks``: ranks in one; ``known``: a plan's cost.

    Only pairs that a plan cheaper than ``known`` can use are filled; ``groups`` 0: all of them.
    """
    n = len(P)
    result = np.full((n, n), HUGE)
    back = np.zeros((n, M + 1, 2), np.int32)
    W = from_source(V, P, X, 0, M, B, n_prev, HUGE if groups == 0 else known * groups, back)
    result[0, :] = W[:, M]
    tails = to_sink(V, P, X, M, B, n_prev)
    result[:, n - 1] = np.minimum(result[:, n - 1], tails)
    if groups == 2:
        return result
    for s in range(1, n - 1):
        bound = HUGE
        if groups > 0:
            # a middle piece leaves a group to what is behind it, and to what is before it as many as that needs
            left = groups - groups_for(C[s], known * ranks) - 1
            if left < 1:
                continue
            bound = known * left
        W = from_source(V, P, X, s, M, B, n_prev, bound, back)
        result[s, s + 1 : n - 1] = W[s + 1 : n - 1, M]
    return result


@compiled
def walk(back: Array, n: int, M: int) -> Array:
    """Return the stages that ``from_source`` chose for 0..end on M groups, as rows (i, j, groups)."""
    rows = np.zeros((n, 3), np.int64)
    count, j, m = 0, n - 1, M
    while j > 0:
        k, used = back[j, m, 0], back[j, m, 1]
        rows[count, 0], rows[count, 1], rows[count, 2] = k, j, used
        count, j, m = count + 1, k, m - used
    return rows[:count][::-1].copy()
