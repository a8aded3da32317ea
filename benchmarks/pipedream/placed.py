"""Contiguous placement on several levels of links: the ranks in order, and each stage on the next ones.

f(i, a, l) is the least bottleneck of the stages before state i on ranks 0..a-1, if the cut at i uses links of level l.
The formulas are those of ``flat``, with the links that a stage on ranks a..a+r-1 uses (``Placement``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.pipedream.flat import FlatSearch, Stages
from benchmarks.pipedream.states import States

Array = Any
MOST_T = 1e6  # times the least T: no plan is that slow


@dataclass(frozen=True)
class Placement:
    """The links of a stage on ranks a..a+r-1, in arrays indexed by a and r."""

    reduce: Array  # seconds of an all-reduce, per byte of parameters
    before: Array  # the lowest level of links that the cut before it can use
    behind: Array  # the same of the cut behind it
    send: Array  # seconds per byte across a cut, also indexed by level

    @staticmethod
    def of(widths: tuple[int, ...], bandwidths: tuple[float, ...], G: int) -> Placement:
        """Return the placement on G ranks. ``widths``: the ranks in a group of every level, the innermost first (1).

        The all-reduce runs level by level, in each between the largest number of members of one group. The groups of
        level l - 1 share a cut at level l. A message between groups also passes the links inside them: it is as slow as
        the narrowest link, which is the outermost unless outer links are faster.
        """
        L = len(bandwidths)
        narrowest = np.minimum.accumulate(bandwidths)
        a, r = np.meshgrid(np.arange(G + 1), np.arange(G + 1), indexing="ij")
        last = a + r - 1
        reduce, send = np.zeros((G + 1, G + 1)), np.zeros((G + 1, G + 1, L))
        before, behind = np.zeros((G + 1, G + 1), np.int64), np.zeros((G + 1, G + 1), np.int64)
        for level in range(L):
            inner, outer = widths[level], widths[level + 1]
            members = np.zeros((G + 1, G + 1), np.int64)
            for group in range(-(-G // outer)):
                low, high = np.maximum(a, group * outer), np.minimum(last, (group + 1) * outer - 1)
                members = np.maximum(members, np.where(low <= high, high // inner - low // inner + 1, 0))
            members = np.maximum(members, 1)
            reduce += 4.0 * (members - 1) / (bandwidths[level] * members)
            spans = np.maximum(last // inner - a // inner + 1, 1)
            send[:, :, level] = 2.0 / (narrowest[level] * spans)
            # a cut uses links of the first level whose groups contain both of its sides
            before += (a > 0) & (level < L - 1) & (last // outer != (a - 1) // outer)
            behind += (a + r < G) & (level < L - 1) & ((a + r) // outer != a // outer)
        return Placement(reduce, before, behind, send)


class PlacedSearch:
    """The search over some states on ``ranks`` ranks.

    ``steps``: the stages tried so far, and their limit, beyond which the search fails.
    """

    def __init__(
        self, states: States, widths: tuple[int, ...], bandwidths: tuple[float, ...], ranks: int, straight: bool
    ) -> None:
        self.states, self.G, self.straight, self.L = states, ranks, straight, len(bandwidths)
        self.placement = Placement.of(widths, bandwidths, ranks)
        self.fastest = max(bandwidths)

    def solve(self, limit: float, known: float, steps: list[int]) -> tuple[float, Stages]:
        """Return (cost, stages) of the best plan cheaper than ``known``; infinity and no stages without a plan.

        Only states that can still lead to a bottleneck below a bound T are followed: the layers before i fit on a
        ranks, and those behind on the other ranks even with the fastest links everywhere (``flat``). The least T for
        which that is possible is the first bound. T is increased until there is a plan, which is then the best one.
        With a memory limit, all ranks must be used: then the number of devices behind a stage, and so its memory, is
        known.
        """
        flat = FlatSearch(self.states, self.fastest, limit, self.straight)
        low, _ = flat.solve(self.G, known)
        if low >= known:
            return math.inf, []
        n, G, T = self.states.count, self.G, low * 1.02
        while True:
            T = min(T, known)
            f = np.full((self.L, n, G + 1), math.inf)
            f[:, 0, 0] = 0.0
            back = np.zeros((self.L, n, G + 1, 3), np.int32)
            if not self._follow(f, back, flat.least_devices(T, G), T, limit, steps):
                return math.inf, []
            ends = f[:, n - 1, 1 if limit == math.inf else G :]
            best = float(ends.min())
            if best < math.inf or known <= T or MOST_T * low < T:
                break
            T *= 1.25
        if best == math.inf:
            return math.inf, []
        at, level = np.unravel_index(int(np.argmin(ends.T)), ends.T.shape)
        return best, self._walk(back, int(at) + G + 1 - ends.shape[1], int(level))

    def _follow(self, f: Array, back: Array, g: Array, T: float, limit: float, steps: list[int]) -> bool:
        """Compute f and, for each entry, (state, replicas, level before) of the stage that gave it."""
        states, G, place = self.states, self.G, self.placement
        C, P, A, X = states.seconds, states.parameters, states.activations, states.crossing
        n = states.count
        for i in range(n - 1):
            first = 0 if i == 0 else max(1, math.ceil(C[i] / T - 1e-9))
            last = 0 if i == 0 else min(G - 1, G - int(g[i]))
            if first > last:
                continue
            starts = first + np.flatnonzero((f[:, i, first : last + 1] < T).any(axis=0))
            if not len(starts):
                continue
            if steps[0] > steps[1]:
                return False
            ends = (
                np.arange(i + 1, n) if states.chain else states.supersets[states.pointers[i] : states.pointers[i + 1]]
            )
            c = C[ends] - C[i]
            least = np.maximum(1, np.ceil(c / T - 1e-9)).astype(np.int64)
            # by (start, end): the replicas to try, at most as many as leave ``g`` ranks for the stages behind
            room = G - starts[:, None] - g[ends]
            near = (room >= 1) & (c <= T * (G - starts[:, None]))
            counts = np.where(near, np.maximum((np.minimum(room, 1) if self.straight else room) + 1 - least, 0), 0)
            total = int(counts.sum())
            steps[0] += int(near.sum()) + total
            if not total:
                continue
            which = np.repeat(np.arange(counts.size), counts.ravel())
            firsts = np.cumsum(counts.ravel()) - counts.ravel()
            a, q = starts[which // len(ends)], which % len(ends)
            r = least[q] + np.arange(total) - firsts[which]
            j, p = ends[q], P[ends[q]] - P[i]
            t = (c[q] + p * place.reduce[a, r]) / r
            fits = t < T
            if limit < math.inf:
                fits &= (j == n - 1) | (-(-(G - a - r) // r) * (A[j] - A[i] + p) <= limit)
            (kept,) = np.nonzero(fits)
            if len(kept):
                a, j, r, t = a[kept], j[kept], r[kept], t[kept]
                self._offer(f, back, i, j, a, r, t, T, 0.0 if i == 0 else X[i], np.where(j < n - 1, X[j], 0.0))
        return True

    def _offer(
        self, f: Array, back: Array, i: int, j: Array, a: Array, r: Array, t: Array, T: float, x: float, y: Array
    ) -> None:
        """Lower f where a stage from state i to j on ranks a..a+r-1 of t seconds does. ``x``, ``y``: bytes of its cuts.

        Of equally good stages, the first one counts.
        """
        place = self.placement
        arrive, came = np.full(len(j), math.inf), np.zeros(len(j), np.int64)
        for level in range(self.L):
            v = np.maximum(f[level, i, a], x * place.send[a, r, level])
            better = (place.before[a, r] <= level) & (v < arrive)
            arrive[better], came[better] = v[better], level
        t = np.maximum(t, arrive)
        (kept,) = np.nonzero(t < T)
        if not len(kept):
            return
        a, j, r, t, came = a[kept], j[kept], r[kept], t[kept], came[kept]
        for level in range(self.L):
            # the first stage has no cut before it, and sends nothing: as in PipeDream, its cut counts for the next one
            v = t if i == 0 else np.maximum(t, y[kept] * place.send[a, r, level])
            v = np.where(place.behind[a, r] <= level, v, math.inf)
            before = f[level, j, a + r]
            np.minimum.at(f[level], (j, a + r), v)
            (won,) = np.nonzero((v < before) & (v == f[level, j, a + r]))
            won = won[::-1]  # of several values for one entry, numpy keeps the last
            back[level, j[won], a[won] + r[won]] = np.stack([np.full(len(won), i), r[won], came[won]], axis=1)

    def _walk(self, back: Array, at: int, level: int) -> Stages:
        stages: Stages = []
        i = self.states.count - 1
        while i > 0:
            before, r, came = (int(value) for value in back[level, i, at])
            stages.append((before, i, r))
            i, at, level = before, at - r, came
        return stages[::-1]
