"""The searches over PipeDream's formulas with one kind of link, and with stages on ranks in order, as loops.

They are the recursions written out: one stage after the other, in plain loops over numbers. The planner computes the
same values in array operations, and must return the same plans.
"""

# ruff: noqa: SIM300 - one loop in the other; T is not a constant

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = Any


def replicas_needed(c: float, k: float, x: float, T: float, B: float) -> int:
    """Return the least r for which a stage costs at most T, by the closed form. ``x``: the larger of its two cuts.

    (c + k (r-1)/r)/r <= T is T r^2 - (c + k) r + k >= 0: r = 1 if c <= T, otherwise the larger root.
    """
    r = 1
    if c > T:
        b = c + k
        D = b * b - 4.0 * T * k
        r = math.ceil((b + math.sqrt(max(D, 0.0))) / (2.0 * T) - 1e-9)
    r = max(r, math.ceil(2.0 * x / (B * T) - 1e-12), 1)
    while (c + k * (r - 1) / r) / r > T * (1 + 1e-13):
        r += 1
    return r


def least_devices(
    pointers: Array, supersets: Array, C: Array, P: Array, A: Array, X: Array,
    T: float, B: float, G: int, limit: float, straight: bool, g: Array, after: Array, replicas: Array,
) -> int:  # fmt: skip
    """Set g[i] to the least devices with which every stage behind state i costs at most T; return g[0].

    Fewer devices behind a stage are never worse, neither for the stages before it nor for the microbatches in flight.
    So one number per state is enough for every G. ``after``, ``replicas``: the choice at i.
    """
    n = len(C)
    chain = len(pointers) == 0
    g[n - 1] = 0
    for i in range(n - 2, -1, -1):
        # bounds from the seconds alone: the devices for the layers behind i, and those left by the layers before it
        floor = max(1, math.ceil((C[n - 1] - C[i]) / T - 1e-9))
        best, next_state, count = G + 1 - max(0, math.ceil(C[i] / T - 1e-9)), -1, 0
        if floor >= best:
            g[i] = G + 1
            continue
        start, stop = (i + 1, n) if chain else (pointers[i], pointers[i + 1])
        for q in range(start, stop):
            j = q if chain else supersets[q]
            d = g[j]
            c = C[j] - C[i]
            if c > T * (best - 1 - d):
                # seconds increase along a chain, so once they are too many for all devices, no later j fits
                if chain and c > T * (best - 1):
                    break
                continue
            if d + 1 >= best:
                continue
            x = 0.0
            if i > 0:
                x = X[i]
                if j < n - 1 and X[j] > x:
                    x = X[j]
            k = 4.0 * (P[j] - P[i]) / B
            # no possible number of replicas is enough; this also avoids numbers beyond the integers
            if 2.0 * x > B * T * best or (c > T and c + k > 2.0 * T * best):
                continue
            r = 1
            if c > T or 2.0 * x > B * T:
                r = replicas_needed(c, k, x, T, B)
            if straight and r > 1:
                continue
            stage_bytes = A[j] - A[i] + P[j] - P[i] if j < n - 1 else 0.0
            # more replicas hold less each but may cost more: both conditions are checked for every count
            while r + d < best and (
                math.ceil(d / r) * stage_bytes > limit or (c + k * (r - 1) / r) / r > T * (1 + 1e-13)
            ):
                r += 1
                if straight:
                    r = G + 1
            if r + d < best:
                best, next_state, count = r + d, j, r
                if best <= floor:
                    break
        g[i], after[i], replicas[i] = best if count else G + 1, next_state, count
    return int(g[0])


def stage_cost(C: Array, P: Array, X: Array, i: int, j: int, r: int, B: float) -> float:
    """Return the cost of one stage by the formula of the module."""
    n = len(C)
    cost: float = (C[j] - C[i] + 4.0 * (P[j] - P[i]) / B * (r - 1) / r) / r
    if i > 0:
        cost = max(cost, 2.0 * X[i] / (B * r))
        if j < n - 1:
            cost = max(cost, 2.0 * X[j] / (B * r))
    return cost


def solve_flat(
    pointers: Array, supersets: Array, C: Array, P: Array, A: Array, X: Array,
    B: float, G: int, limit: float, straight: bool, known: float,
) -> tuple[float, Array, Array]:  # fmt: skip
    """Return (cost, after, replicas) of the best plan on G devices behind one kind of link, or infinity.

    Only plans cheaper than ``known`` count. The bottleneck T is bisected. A feasible T gives a plan, whose cost is the
    new upper end. After two infeasible T in a row, T is set just below the upper end, which usually ends the search.
    """
    n = len(C)
    g, after, replicas = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    best_after, best_replicas = after.copy(), replicas.copy()
    low, high, best_bottleneck = C[n - 1] / G, known, math.inf
    T = low * 1.1
    if known < math.inf:
        T = known * (1 - 1e-10)
    refused = 0
    for _ in range(200):  # pragma: no branch - the bisection ends by its ``break``
        if least_devices(pointers, supersets, C, P, A, X, T, B, G, limit, straight, g, after, replicas) <= G:
            worst, i = 0.0, 0
            while i < n - 1:
                worst = max(worst, stage_cost(C, P, X, i, after[i], replicas[i], B))
                i = after[i]
            high = best_bottleneck = worst
            refused = 0
            best_after[:] = after
            best_replicas[:] = replicas
        else:
            low = T
            refused += 1
        if high >= math.inf:
            T *= 1.5
        elif high <= low * (1 + 2e-10):
            break
        elif refused == 2:
            T = high * (1 - 1e-10)
        else:
            T = math.sqrt(low * high)
    return best_bottleneck, best_after, best_replicas


def _spans(a: int, r: int, width: int) -> int:
    """Return the number of groups of ``width`` ranks that the ranks a..a+r-1 touch."""
    return (a + r - 1) // width - a // width + 1


def _most_in_one(a: int, r: int, inner: int, outer: int) -> int:
    """Return the most groups of ``inner`` ranks that ranks a..a+r-1 touch in one group of ``outer`` ranks."""
    most = 0
    for group in range(a // outer, (a + r - 1) // outer + 1):
        first, last = max(a, group * outer), min(a + r, (group + 1) * outer) - 1
        most = max(most, last // inner - first // inner + 1)
    return most


def placement_tables(widths: Array, bandwidths: Array, G: int) -> tuple[Array, Array, Array, Array]:
    """Return, for ranks a..a+r-1: all-reduce seconds a byte, the level of the cuts before and behind, seconds a byte.

    ``widths``: the ranks in a group of every level, innermost first, starting with 1. The all-reduce runs level by
    level, in each between the largest number of members of one group. The groups of level l - 1 share a cut at level l.
    A message between groups also passes the links inside them: it is as slow as the narrowest link, which is the
    outermost unless outer links are faster.
    """
    L = len(bandwidths)
    narrowest = bandwidths.copy()
    for level in range(1, L):
        narrowest[level] = min(narrowest[level], narrowest[level - 1])
    reduce = np.zeros((G + 1, G + 1))
    before, behind = np.zeros((G + 1, G + 1), np.int64), np.zeros((G + 1, G + 1), np.int64)
    send = np.zeros((G + 1, G + 1, L))
    for a in range(G):
        for r in range(1, G - a + 1):
            for level in range(L):
                members = _most_in_one(a, r, widths[level], widths[level + 1])
                reduce[a, r] += 4.0 * (members - 1) / (bandwidths[level] * members)
                send[a, r, level] = 2.0 / (narrowest[level] * _spans(a, r, widths[level]))
            while a > 0 and before[a, r] < L - 1 and _spans(a - 1, r + 1, widths[before[a, r] + 1]) > 1:
                before[a, r] += 1
            while a + r < G and behind[a, r] < L - 1 and _spans(a, r + 1, widths[behind[a, r] + 1]) > 1:
                behind[a, r] += 1
    return reduce, before, behind, send


def solve_contiguous(
    pointers: Array, supersets: Array, C: Array, P: Array, A: Array, X: Array,
    widths: Array, bandwidths: Array, G: int, limit: float, straight: bool, known: float, steps: Array,
) -> tuple[float, Array]:  # fmt: skip
    """Return (cost, stages) of stages on the ranks in order, for several link levels; (inf, empty) if none fit.

    f(i, a, l) is the least bottleneck of the stages before state i on ranks 0..a-1, if the cut at i uses links of level
    l. Only states that can still lead to a bottleneck below a bound T are followed: the layers before i fit on a ranks,
    and those behind on the other ranks even with the fastest links everywhere (``least_devices``). The least T for
    which that is possible is the first bound. T is increased until there is a plan, which is then the best one. A row
    of stages is (i, j, first rank, replicas). With a memory limit, all ranks must be used: then the number of devices
    behind a stage, and so its memory, is known. ``steps``: the number of stages tried, and its limit, beyond which
    the search fails.
    """
    n, L = len(C), len(bandwidths)
    reduce, before, behind, send = placement_tables(widths, bandwidths, G)
    chain = len(pointers) == 0
    stages = np.zeros((0, 4), np.int64)
    fastest = bandwidths.max()
    low = solve_flat(pointers, supersets, C, P, A, X, fastest, G, limit, straight, known)[0]
    if low >= known:
        return math.inf, stages
    T = low * 1.02
    g, after, replicas = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    f = np.empty((n, G + 1, L))
    back = np.zeros((n, G + 1, L, 3), np.int32)
    while True:
        T = min(T, known)
        f[:] = math.inf
        f[0, 0, :] = 0.0
        least_devices(pointers, supersets, C, P, A, X, T, fastest, G, limit, straight, g, after, replicas)
        for i in range(n - 1):
            start, stop = (i + 1, n) if chain else (pointers[i], pointers[i + 1])
            first_a = 0 if i == 0 else max(1, math.ceil(C[i] / T - 1e-9))
            last_a = 0 if i == 0 else min(G - 1, G - g[i])
            for a in range(first_a, last_a + 1):
                open_state = False
                for level in range(L):
                    if f[i, a, level] < T:
                        open_state = True
                if not open_state:
                    continue
                if steps[0] > steps[1]:
                    return math.inf, stages
                for q in range(start, stop):
                    j = q if chain else supersets[q]
                    c = C[j] - C[i]
                    if c > T * (G - a):  # pragma: no cover - only rounding: ``g[i]`` devices have time for the rest
                        if chain:
                            break
                        continue
                    if g[j] > G - a - 1:
                        continue
                    p = P[j] - P[i]
                    least = max(1, math.ceil(c / T - 1e-9))
                    most = 1 if straight else G - a
                    most = min(most, G - a - g[j])
                    steps[0] += 1 + max(0, most + 1 - least)
                    for r in range(least, most + 1):
                        t = (c + p * reduce[a, r]) / r
                        if t >= T:
                            continue
                        if j < n - 1 and math.ceil((G - a - r) / r) * (A[j] - A[i] + p) > limit:
                            continue
                        arrive, came = math.inf, 0
                        for level in range(before[a, r], L):
                            v = f[i, a, level]
                            if i > 0:
                                v = max(v, X[i] * send[a, r, level])
                            if v < arrive:
                                arrive, came = v, level
                        t = max(t, arrive)
                        if t >= T:
                            continue
                        for level in range(behind[a, r], L):
                            v = t
                            if i > 0 and j < n - 1:
                                v = max(v, X[j] * send[a, r, level])
                            if v < f[j, a + r, level]:
                                f[j, a + r, level] = v
                                back[j, a + r, level, 0] = i
                                back[j, a + r, level, 1] = r
                                back[j, a + r, level, 2] = came
        best, at, level = math.inf, 0, 0
        for a in range(1 if limit >= math.inf else G, G + 1):
            for k in range(L):
                if f[n - 1, a, k] < best:
                    best, at, level = f[n - 1, a, k], a, k
        if best < math.inf or T >= known or T > 1e6 * low:
            break
        T *= 1.25
    if best >= math.inf:
        return math.inf, stages
    count, i = 0, n - 1
    rows = np.zeros((n, 4), np.int64)
    while i > 0:
        j, r = back[i, at, level, 0], back[i, at, level, 1]
        level, at = back[i, at, level, 2], at - r
        rows[count, 0], rows[count, 1], rows[count, 2], rows[count, 3] = j, i, at, r
        count, i = count + 1, j
    return best, rows[:count][::-1].copy()
