"""PipeDream's nested placement, in which level k + 1 treats a group of level k as one device.

V(i, j) is the best time of states i..j inside one group (the plain seconds at the lowest level), M the groups::

    first(s, j, m)   = (V(s, j) + 4 (m-1) P / (B m) / n_prev) / m             n_prev: groups of the level below
    later(k, j, m)   = max((V(k, j) + 4 (m-1) P / (B m)) / m, 2 X_k / (B m), 2 X_j / (B m) unless j is the end)
    W_s(j, m)        = min(first(s, j, m), min over k, m' of max(W_s(k, m - m'), later(k, j, m')))

and V of the next level is W_i(j, M). Contiguous placement cannot express all of these plans, and they cannot express
all of its plans, so the better of both is kept. The minimum over k is a product of two matrices, with the larger
instead of the product and the least instead of the sum, so it is computed for all s and j at once. Of the last level
only W_0 is needed, and of the level below only the pieces that can be part of a plan cheaper than ``known``. With two
groups these are heads and tails, which one pass in each direction computes.

With a memory limit, a stage does not fit if a copy of its bytes for each minibatch in flight exceeds the limit::

    first(s, j, m):  ceil((M - m) / m)   (Z_j - Z_s) <= limit        Z: bytes of activations and parameters
    later(k, j, m'): ceil((M - m) / m')  (Z_j - Z_k) <= limit        m: groups up to and with this stage

at every level, with the groups of that level. As in PipeDream, the last stage always fits.

Source: PipeDream, ``optimizer_graph_hierarchical.py`` (``compute_partitioning``).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from benchmarks.pipedream.flat import Stages

Array = Any


class TooManyStepsError(Exception):
    """The search would take more steps than allowed."""


class NestedSearch:
    """The levels of one search, over states that are sorted by their seconds.

    ``limit``: bytes of a device, or infinity. ``most_steps``: the numbers that may be computed.
    """

    def __init__(self, C: Array, P: Array, X: Array, Z: Array, limit: float, most_steps: int) -> None:
        self.C, self.P, self.Z, self.n = C, P, Z, len(C)
        self.X, self.sent = X, np.append(X[:-1], 0.0)  # nothing is sent at the end
        self.limit, self.steps_left = limit, most_steps

    def take(self, steps: int) -> None:
        """Count steps before they are taken. Raises: TooManyStepsError."""
        self.steps_left -= steps
        if self.steps_left < 0:
            raise TooManyStepsError


class Level:
    """The stages of one level of links.

    ``V``: by pair of states, infinite if they are not nested. ``M``: the groups. ``B``: bytes per second. ``below``:
    the groups of the level below. Stages are computed for one state at a time, for all states at the other end and
    all numbers of groups 1..M: shape (M, n).
    """

    def __init__(self, search: NestedSearch, V: Array, M: int, B: float, below: int) -> None:
        self.search, self.V, self.M, self.B, self.below, self.n = search, V, M, B, below, search.n
        self.m = np.arange(1, M + 1)[:, None]

    def first_from(self, s: int) -> Array:
        """Return ``first`` of the stages that begin at s; infinite where they do not fit with the groups behind."""
        reduce = 4.0 * (self.m - 1) * (self.search.P - self.search.P[s]) / (self.B * self.m) / self.below
        seconds = (self.V[s] + reduce) / self.m
        return self._fitting(seconds, self.M - self.m, self.m, self.search.Z - self.search.Z[s])

    def later_from(self, k: int) -> Array:
        """Return ``later`` of the stages that begin at k, without regard to memory."""
        P, cut = self.search.P, np.maximum(self.search.X[k], self.search.sent)
        return self._later(self.V[k], P - P[k], cut)

    def later_to(self, j: int) -> Array:
        """Return ``later`` of the stages that end at j, without regard to memory."""
        P, cut = self.search.P, np.maximum(self.search.X, self.search.sent[j])
        return self._later(self.V[:, j], P[j] - P, cut)

    def _later(self, seconds: Array, p: Array, cut: Array) -> Array:
        shared = (seconds + 4.0 * (self.m - 1) * p / (self.B * self.m)) / self.m
        return np.maximum(shared, 2.0 * cut / (self.B * self.m))

    def _fitting(self, seconds: Array, behind: Any, groups: Any, size: Array) -> Array:
        """Return the seconds of stages of ``size`` bytes, infinite where they do not fit."""
        if self.search.limit == math.inf:
            return seconds
        return np.where(-(-behind // groups) * size <= self.search.limit, seconds, math.inf)

    def heads(self) -> tuple[Array, Array]:
        """Return W_0(j, m), shape (n, M + 1), and for each the state at which its last stage begins and its groups.

        Of equally good cuts, that of the state before is kept, otherwise the latest of those with the fewest groups.
        """
        n, M, Z = self.n, self.M, self.search.Z
        self.search.take(n * n * M * M // 4)
        W = np.full((n, M + 1), math.inf)
        back = np.zeros((n, M + 1, 2), np.int64)
        whole = self.first_from(0)
        for j in range(1, n):
            if self.V[0, j] == math.inf:
                continue
            W[j, 1:] = whole[:, j]
            back[j, 1:, 1] = self.m[:, 0]
            if j == 1:
                continue
            later = self.later_to(j)[:, j - 1 : 0 : -1]  # from the latest cut to the earliest
            before = W[j - 1 : 0 : -1].T
            for m in range(2, M + 1):
                groups = self.m[: m - 1]
                last = self._fitting(later[: m - 1], M - m, groups, Z[j] - Z[j - 1 : 0 : -1])
                totals = np.maximum(last, before[m - 1 : 0 : -1])
                row, column = divmod(int(totals.argmin()), j - 1)
                least = totals[row, column]
                if least >= W[j, m]:
                    continue
                cut, used = (int(value) for value in back[j - 1, m])
                same = cut > 0 and W[j - 1, m] < math.inf and totals[used - 1, j - 1 - cut] == least
                W[j, m] = least
                back[j, m] = (cut, used) if same else (j - 1 - column, row + 1)
        return W, back

    def tails(self) -> Array:
        """Return W_s(end, M) for every s, in one backward pass in which all s share the stages behind the first."""
        n, M, Z = self.n, self.M, self.search.Z
        self.search.take(n * n * M * M // 4)
        S = np.full((M + 1, n), math.inf)
        result = np.full(n, math.inf)
        for k in range(n - 2, -1, -1):
            if self.V[k, -1] == math.inf:
                continue
            between, size = slice(k + 1, n - 1), Z[k + 1 : n - 1] - Z[k]
            later, first = self.later_from(k), self.first_from(k)
            S[1:, k] = later[:, -1]
            for m in range(2, M + 1):
                groups = self.m[: m - 1]
                heads = self._fitting(later[: m - 1, between], m - groups, groups, size)
                totals = np.maximum(heads, S[m - 1 : 0 : -1, between])
                S[m, k] = min(S[m, k], totals.min(initial=math.inf))
            totals = np.maximum(first[: M - 1, between], S[M - 1 : 0 : -1, between])
            result[k] = min(first[M - 1, -1], totals.min(initial=math.inf))
        return result

    def middles(self, ranks: int, bound: Array) -> Array:
        """Return W_s(j, M) for every pair s < j; values of ``bound[s]`` and more may be too large.

        ``ranks``: in each group. No plan needs a row whose bound is 0. Without regard to bytes, a stage takes its plain
        seconds divided by its ranks, which excludes pairs that are far apart.
        """
        n, M, C, Z = self.n, self.M, self.search.C, self.search.Z
        rows = int(np.count_nonzero(bound > 0))  # the bounds do not increase
        far = bound.max(initial=0.0) * ranks * (1 + 1e-9)
        # for each cut, by groups: the first start before it, and the end of the ends behind it
        low = [np.searchsorted(C, C - far * m, side="left") for m in range(1, M)]
        high = [np.minimum(np.searchsorted(C, C + far * m, side="right"), n - 1) for m in range(1, M)]
        cuts = np.arange(n)
        widest = np.maximum(np.minimum(cuts, rows) - low[-1], 0) * np.maximum(high[-1] - cuts, 0) if M > 1 else cuts
        self.search.take(int(widest.sum()) * M * (M - 1) // 2 + rows * n * M)
        W = np.full((M + 1, rows, n), math.inf)
        for s in range(1, rows):
            W[1:, s] = self.first_from(s)
        for k in range(2, n - 1):
            later = self.later_from(k)
            for m, used in itertools.combinations(range(M, 0, -1), 2):
                start, stop = max(1, low[m - used - 1][k]), min(k, rows)
                ends = slice(k + 1, high[used - 1][k])
                if start < stop and ends.start < ends.stop:
                    last = self._fitting(later[used - 1, ends], M - m, used, Z[ends] - Z[k])
                    totals = np.maximum(W[m - used, start:stop, k, None], last)
                    np.minimum(W[m, start:stop, ends], totals, out=W[m, start:stop, ends])
        pieces = np.full((n, n), math.inf)
        pieces[1:rows, : n - 1] = W[M, 1:, : n - 1]
        return pieces

    def pieces(self, ranks: int, groups: int, known: float) -> Array:
        """Return V of the next level. ``ranks``: in each group. ``groups``: of the next level, 0 for all pairs.

        Otherwise only pairs that a plan cheaper than ``known`` can use are computed.
        """
        bound = np.full(self.n, math.inf)
        if groups:
            # besides a middle piece, at least one group is for what is behind it, and enough for what is before it
            before = np.maximum(1, np.ceil(self.search.C / (known * ranks * self.M) - 1e-9))
            bound = known * np.maximum(groups - before - 1, 0)
        result = self.middles(ranks, bound) if groups != 2 else np.full((self.n, self.n), math.inf)
        W, _ = self.heads()
        result[0] = W[:, self.M]
        result[:, -1] = np.minimum(result[:, -1], self.tails())
        return result


def stages_of(back: Array, M: int) -> Stages:
    """Return the stages of ``heads`` for all states on M groups."""
    stages: Stages = []
    j, m = len(back) - 1, M
    while j > 0:
        k, used = (int(value) for value in back[j, m])
        stages.append((k, j, used))
        j, m = k, m - used
    return stages[::-1]
