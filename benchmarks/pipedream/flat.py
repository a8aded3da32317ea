"""The search with one kind of link, over all states (ideals or prefixes) at once, in array operations.

A stage is the difference of states ``i`` and ``j``. ``C``, ``P`` and ``A`` are prefix sums of seconds, parameter bytes
and activation bytes, ``X`` the bytes across a state's cut, ``r`` replicas, ``B`` the bandwidth, and ``d`` the devices
behind the stage::

    seconds = (C + 4 (r-1) P / (r B)) / r       all-reduce as PipeDream counts it (parameter server, both ways)
    input   = 2 X_i / (B r)                     except for the first stage
    output  = 2 X_j / (B r)                     except for the first and the last stage
    cost    = max of the three;  memory: ceil(d / r) (A + P) <= limit

For a bottleneck T, the least r of every stage has a closed form: (c + k (r-1)/r)/r <= T is T r^2 - (c + k) r + k >= 0,
so r = 1 if c <= T, otherwise the larger root. It does not depend on the devices behind, so it is computed for blocks of
stages in a few array operations. Only the memory limit raises it, where the stages behind are known.

Source: PipeDream (SOSP 2019) and its ``optimizer_graph_hierarchical.py``; the search is ours (parametric).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.pipedream.states import States

Array = Any
Stages = list[tuple[int, int, int]]
"""Stages as (state at which it begins, state at which it ends, replicas or groups)."""
_BLOCK = 40_000  # stages of one array operation: the arrays of a block stay in the cache of the processor
_MOST_KEPT = 1_000_000  # stages whose terms are computed once for all T
_ROUNDING = 1 + 1e-13


@dataclass(frozen=True)
class _Block:
    """Stages that begin at neighbouring states. The arrays have one entry for each stage, row after row."""

    rows: tuple[tuple[int, int, Array, int, int], ...]  # see ``FlatSearch._rows``; the last states first
    ends: Array  # the state at which a stage ends
    c: Array  # seconds
    k: Array  # 4 P / B, seconds
    x: Array  # twice the bytes of the larger of its two cuts
    size: Array  # bytes of parameters and activations; 0 for last stages, which have nothing behind them


class FlatSearch:
    """The stages over some states, behind one kind of link.

    ``bandwidth``: bytes per second. ``limit``: bytes of a device, or infinity. ``straight``: one device per stage.
    """

    def __init__(self, states: States, bandwidth: float, limit: float, straight: bool) -> None:
        self.states, self.B, self.limit, self.straight = states, bandwidth, limit, straight
        self.n = states.count

    def stage_cost(self, i: int, j: int, r: int) -> float:
        """Return the cost of one stage by the formula of the module."""
        C, P, X = self.states.seconds, self.states.parameters, self.states.crossing
        cost = float((C[j] - C[i] + 4.0 * (P[j] - P[i]) / self.B * (r - 1) / r) / r)
        if i > 0:
            cost = max(cost, float(2.0 * X[i] / (self.B * r)))
            if j < self.n - 1:
                cost = max(cost, float(2.0 * X[j] / (self.B * r)))
        return cost

    def solve(self, G: int, known: float) -> tuple[float, Stages]:
        """Return (cost, stages) of the best plan on G devices cheaper than ``known``, or infinity and none.

        A stage is (i, j, replicas). The bottleneck T is bisected. A feasible T gives a plan, whose cost is the new
        upper end. After two infeasible T in a row, T is set just below the upper end, which usually ends the search.
        """
        best: tuple[float, Stages] = (math.inf, [])
        low, high = float(self.states.seconds[-1]) / G, known
        T = low * 1.1 if known == math.inf else known * (1 - 1e-10)
        refused = 0
        for _ in range(200):  # pragma: no branch - the bisection ends by its ``break``
            g = self.least_devices(T, G)
            if g[0] <= G:
                stages = self._stages(T, G, g)
                high = max(self.stage_cost(*stage) for stage in stages)
                best, refused = (high, stages), 0
            else:
                low, refused = T, refused + 1
            if high == math.inf:
                T *= 1.5
            elif high <= low * (1 + 2e-10):
                break
            elif refused == 2:
                T = high * (1 - 1e-10)
            else:
                T = math.sqrt(low * high)
        return best

    def least_devices(self, T: float, G: int) -> Array:
        """Return, by state, the least devices with which every stage behind it costs at most T; G + 1 if none suffice.

        Fewer devices behind a stage are never worse, neither for the stages before it nor for the microbatches in
        flight. So one number per state is enough for every G.
        """
        g = np.full(self.n, G + 1)
        g[-1] = 0
        # the devices for the layers before a state are not available for those behind it
        most = G - np.maximum(0, np.ceil(self.states.seconds / T - 1e-9))
        for block in self._blocks:
            replicas = self._least_replicas(block, T, G)
            for first, end, starts, start, stop in block.rows:
                d = g[block.ends[start:stop]]
                r = replicas[start:stop]
                if self.limit < math.inf:
                    r = self._within_limit(block, start, stop, r, d, T, G)
                least = np.minimum.reduceat(r + d, starts)
                g[first:end] = np.where(least <= most[first:end], least, G + 1)
        return g

    def _stages(self, T: float, G: int, g: Array) -> Stages:
        """Return the stages that ``g`` counts: of equally good ones, those that end at the earliest state."""
        stages: Stages = []
        i = 0
        while i < self.n - 1:
            block = self._block_of(i, i + 1)
            d = g[block.ends]
            r = self._least_replicas(block, T, G)
            if self.limit < math.inf:
                r = self._within_limit(block, 0, len(r), r, d, T, G)
            q = int(np.argmin(r + d))
            stages.append((i, int(block.ends[q]), int(r[q])))
            i = int(block.ends[q])
        return stages

    def _least_replicas(self, block: _Block, T: float, G: int) -> Array:
        """Return the least replicas with which each stage costs at most T, without regard to memory; or G + 1."""
        r = np.ones(len(block.c), np.int64)
        which = np.flatnonzero((block.c > T) | (block.x > self.B * T))
        if self.straight:
            r[which] = G + 1
            return r
        c, k = block.c[which], block.k[which]
        b = c + k
        root = np.ceil((b + np.sqrt(np.maximum(b * b - 4.0 * T * k, 0.0))) / (2.0 * T) - 1e-9)
        least = np.maximum(np.where(c > T, root, 1.0), np.ceil(block.x[which] / (self.B * T) - 1e-12))
        least = np.clip(least, 1.0, G + 1.0)
        slow = np.flatnonzero((c + k * (least - 1) / least) / least > T * _ROUNDING)
        while len(slow):
            slow = slow[least[slow] <= G]
            least[slow] += 1
            q = least[slow]
            slow = slow[(c[slow] + k[slow] * (q - 1) / q) / q > T * _ROUNDING]
        r[which] = least
        return r

    def _within_limit(self, block: _Block, start: int, stop: int, r: Array, d: Array, T: float, G: int) -> Array:
        """Return r, raised where a device would hold too much. More replicas hold less each, but may cost more."""
        size, c, k = block.size[start:stop], block.c[start:stop], block.k[start:stop]
        which = np.flatnonzero((-(-d // r) * size > self.limit) & (r + d <= G))
        if len(which):
            r = r.copy()
        while len(which):
            q = r[which]
            slow = (c[which] + k[which] * (q - 1) / q) / q > T * _ROUNDING
            large = -(-d[which] // q) * size[which] > self.limit
            which = which[(slow | large) & (q + d[which] <= G)]
            r[which] = G + 1 if self.straight else r[which] + 1
        return r

    @functools.cached_property
    def _num_stages(self) -> int:
        return self.n * (self.n - 1) // 2 if self.states.chain else len(self.states.supersets)

    @property
    def _blocks(self) -> Iterator[_Block] | list[_Block]:
        """The blocks of all stages, from the last state to the first."""
        return self._kept if self._num_stages <= _MOST_KEPT else self._built()

    @functools.cached_property
    def _kept(self) -> list[_Block]:
        return list(self._built())

    def _built(self) -> Iterator[_Block]:
        end = self.n - 1
        while end > 0:
            first = end - 1
            while first > 0 and self._stages_from(first - 1, end) <= _BLOCK:
                first -= 1
            yield self._block_of(first, end)
            end = first

    def _stages_from(self, first: int, end: int) -> int:
        if self.states.chain:
            return (end - first) * (2 * self.n - first - end - 1) // 2
        return int(self.states.pointers[end] - self.states.pointers[first])

    def _block_of(self, first: int, end: int) -> _Block:
        """Return the stages that begin at states first..end-1."""
        states, n = self.states, self.n
        if states.chain:
            counts = n - 1 - np.arange(first, end)
            ends = np.concatenate([np.arange(i + 1, n) for i in range(first, end)])
        else:
            counts = np.diff(states.pointers[first : end + 1])
            ends = states.supersets[states.pointers[first] : states.pointers[end]]
        starts = np.concatenate([[0], np.cumsum(counts)])
        begins = np.repeat(np.arange(first, end), counts)
        C, P, X = states.seconds, states.parameters, states.crossing
        last = ends == n - 1
        x = 2.0 * np.maximum(X[begins], np.where(last, 0.0, X[ends]))
        x[begins == 0] = 0.0
        p = P[ends] - P[begins]
        size = np.where(last, 0.0, states.activations[ends] - states.activations[begins] + p)
        return _Block(self._rows(first, starts), ends, C[ends] - C[begins], 4.0 * p / self.B, x, size)

    def _rows(self, first: int, starts: Array) -> tuple[tuple[int, int, Array, int, int], ...]:
        """Return ranges of states in which no state contains another: ideals of one size, or single prefixes.

        For each: its first state and its end, where the stages of each state start, relative to those of the first,
        and where they start and end in the block.
        """
        count = len(starts) - 1
        edges = list(range(count + 1))
        if not self.states.chain:
            sizes = [ideal.bit_count() for ideal in self.states.ideals[first : first + count]]
            edges = [0, *(q for q in range(1, count) if sizes[q] != sizes[q - 1]), count]
        return tuple(
            (first + a, first + b, starts[a:b] - starts[a], int(starts[a]), int(starts[b]))
            for a, b in reversed(list(itertools.pairwise(edges)))
        )
