"""The exact search for p stages on one rank each: minimizes the time of the slowest stage.

t_k(i, j) are the seconds of stage k on atoms i..j-1, with the speed of its device and its links; infinite if it does
not fit::

    best_k(i) = min over j of max(t_k(i, j), best_{k+1}(j)),      best_p(n) = 0

All pairs of one k are one array operation; O(p n^2) in total. Of equally good plans, the result has the earliest cuts:
forwards from stage 0, the first j for which the stage and the rest stay within the optimum.

``best_cuts`` searches only a band of the pairs of cuts: the stages that are short enough for the best plan. No
stage of the best plan takes longer than its slowest stage, and a stage takes at least as long as its computation.
So if a plan takes T, only pairs whose computation takes at most T matter. With p stages that is about one of p/2 pairs.
T is first assumed to be twice the time of equal stages. If the result is slower, it is the T of a second search, and if
no plan fits, the second search has every pair. The result is that of the search over all pairs, to the last bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from autopipe.planning.cost.block_sums import BlockTables
from autopipe.planning.cost.byte_sums import ByteTables
from autopipe.planning.cost.pair_sum import Array
from autopipe.planning.cost.tables import Sized, Tables
from autopipe.planning.search.problem import Problem

_FIRST = 2.0  # T of the first search, in times of equal stages
_WIDEST = 0.5  # of the atoms: a wider band is not worth it
_MOST_KEPT = 2**22  # entries of the tables of all stages that are kept for the way back

T = TypeVar("T", BlockTables, ByteTables, Tables)


def unreplicated_cuts(
    num_atoms: int, num_stages: int, stage_table: Callable[[int], Array]
) -> tuple[float, tuple[int, ...]]:
    """Return (cost of the slowest stage, first atoms of stages 1..p-1); infinite cost and no cuts if none fits.

    ``stage_table(k)``: the cost of stage k for every pair (i, j), shape (n + 1, n + 1).
    """
    above = np.triu(np.ones((num_atoms + 1, num_atoms + 1), dtype=bool), k=1)
    rest = np.full((num_stages + 1, num_atoms + 1), np.inf)
    rest[num_stages, num_atoms] = 0.0
    masked: tuple[Array, Array] | None = None  # the table of the stage behind, and that table without empty stages
    for stage in range(num_stages - 1, -1, -1):
        table = stage_table(stage)
        if masked is None or masked[0] is not table:
            masked = table, np.where(above, table, np.inf)
        rest[stage] = np.maximum(masked[1], rest[stage + 1]).min(axis=1)
    optimum = float(rest[0, 0])
    if not np.isfinite(optimum):
        return np.inf, ()
    starts, at = [], 0
    for stage in range(num_stages - 1):
        worst = np.maximum(stage_table(stage)[at], rest[stage + 1])
        at += 1 + int(np.argmax(worst[at + 1 :] <= optimum))
        starts.append(at)
    return optimum, tuple(starts)


@dataclass(frozen=True)
class _Band:
    """For each atom i, the ends j of the stages to consider: shape (n + 1, width)."""

    ends: npt.NDArray[np.int64]
    inside: npt.NDArray[np.bool_]  # False: a filler

    @staticmethod
    def of(last: npt.NDArray[np.int64]) -> _Band:
        """Return the band of the stages i < j <= ``last[i]``."""
        n = len(last) - 1
        starts = np.arange(n + 1)
        ends = starts[:, None] + 1 + np.arange(max(int((last - starts).max()), 1))[None, :]
        return _Band(np.minimum(ends, n), ends <= last[:, None])

    @functools.cached_property
    def _places(self) -> npt.NDArray[np.int64]:
        rows = len(self.ends)
        places: npt.NDArray[np.int64] = np.arange(rows)[:, None] * rows + self.ends
        return places

    def of_table(self, table: Array) -> Array:
        """Return the entries of a table, shape (n + 1, n + 1), in the band."""
        return np.take(table, self._places)

    def of_tables(self, tables: T) -> T:
        """Return the tables with all of their arrays, and those of their parts, in the band."""
        parts = {field.name: getattr(tables, field.name) for field in dataclasses.fields(tables)}
        arrays: dict[str, Any] = {
            name: self.of_table(part) for name, part in parts.items() if isinstance(part, np.ndarray)
        }
        return dataclasses.replace(tables, **arrays)


@dataclass(frozen=True, kw_only=True)
class _BandedProblem(Problem):
    """A problem whose tables have the pairs of a band."""

    every: Problem  # the same with all pairs
    band: _Band

    @property
    def sized(self) -> Sized:
        """As of all pairs."""
        return self.every.sized

    @functools.cached_property
    def tables(self) -> Tables:
        """The stage tables of the band."""
        tables = self.band.of_tables(self.every.tables)
        return dataclasses.replace(tables, memory=self.band.of_tables(tables.memory))

    @functools.cached_property
    def block_tables(self) -> BlockTables:
        """The stage tables of recompute by block of the band."""
        return self.band.of_tables(self.every.block_tables)

    def limit(self, stage: int) -> float:
        """As of all pairs."""
        return self.every.limit(stage)


def best_cuts(problem: Problem, num_stages: int) -> tuple[float, tuple[int, ...]]:
    """Return what ``unreplicated_cuts`` does for the stages of a problem."""
    n = problem.tables.num_atoms
    seconds = problem.tables.forward_seconds + problem.tables.backward_seconds
    speed = max(device.speed for device in problem.cluster.devices)
    longest = float(seconds[np.arange(n), np.arange(1, n + 1)].max())
    limit = _FIRST * max(float(seconds[0, n]) / num_stages, longest) / speed
    while True:
        band = _Band.of(_last_ends(seconds, limit * speed * (1 + 1e-9)))
        if band.ends.shape[1] > _WIDEST * n:
            return unreplicated_cuts(n, num_stages, lambda stage: problem.stage_table(stage, num_stages))
        cost, starts = _cuts_in_band(problem, num_stages, band)
        if cost <= limit:
            return cost, starts
        limit = cost  # of a plan, or infinite


def _last_ends(seconds: Array, most: float) -> npt.NDArray[np.int64]:
    """Return, for each atom, the last end of a stage that computes for at most ``most`` seconds."""
    n = len(seconds) - 1
    short = np.triu(seconds <= most, k=1)
    last: npt.NDArray[np.int64] = n - np.argmax(short[:, ::-1], axis=1)
    return np.where(short.any(axis=1), last, np.arange(n + 1))


def _cuts_in_band(problem: Problem, num_stages: int, band: _Band) -> tuple[float, tuple[int, ...]]:
    """Return (cost of the slowest stage, first atoms of stages 1..p-1) of the best plan in the band."""
    given = {field.name: getattr(problem, field.name) for field in dataclasses.fields(Problem)}
    banded, n = _BandedProblem(**given, every=problem, band=band), problem.tables.num_atoms
    rest = np.full((num_stages + 1, n + 1), np.inf)
    rest[num_stages, n] = 0.0
    kept: dict[int, Array] = {}
    room = _MOST_KEPT // band.ends.size
    before: Array | None = None
    inside_only = np.empty(0)
    for stage in range(num_stages - 1, -1, -1):
        table = banded.stage_table(stage, num_stages)
        if before is None or before is not table:
            before, inside_only = table, np.where(band.inside, table, np.inf)
        rest[stage] = np.maximum(inside_only, rest[stage + 1][band.ends]).min(axis=1)
        if num_stages - stage <= room:
            kept[stage] = table
    optimum = float(rest[0, 0])
    if not np.isfinite(optimum):
        return np.inf, ()
    starts, at = [], 0
    for stage in range(num_stages - 1):
        table = kept[stage] if stage in kept else banded.stage_table(stage, num_stages)
        worst = np.maximum(table[at], rest[stage + 1][band.ends[at]])
        at = int(band.ends[at, np.argmax((worst <= optimum) & band.inside[at])])
        starts.append(at)
    return optimum, tuple(starts)
