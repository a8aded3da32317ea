"""``BlockSums``: the bytes and seconds of a stage that recomputes by block, for all pairs of cuts or one plan's stages.

Per microbatch in flight such a stage keeps C: what enters or leaves a unit (``units``), what it sends, and what its
nodes outside of units save. While the backward is in a unit, that unit's own activations exist as well::

    U    = max over nodes x of (w_x + saved in the unit of x, up to x)        w workspace of a node
    peak = v W + G + O + k (C + K) + U

The other letters are those of ``memory``. What a unit saves does not include what entered it: C or K counts that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.planning.cost.atoms import Atoms, Units
from autopipe.planning.cost.pair_sum import Array, PairSum, PeakWorkspace, StoredValue, Whole


@dataclass(frozen=True)
class BlockTables:
    """The terms for every pair of cuts: arrays of shape (n + 1, n + 1)."""

    crossing: Array  # C
    unit: Array  # U
    again_seconds: Array  # forward of the units
    last_seconds: Array  # of that, the part of a last unit that need not run again; see ``Units.within``


class BlockSums:
    """The contributions of a graph's values to the terms of every stage that recomputes by block."""

    def __init__(self, atoms: Atoms, units: Units, stored: Iterable[StoredValue]) -> None:
        self.units = units
        self._atoms = atoms
        self._unit_of = units.starts(atoms.count)
        self.crossing = PairSum(atoms.count)
        # by node in a unit, the bytes that it saves and that did not enter the unit
        self.inside = {
            node.name: atoms.costs[node.name].saved_bytes for atom, node in atoms.work if self._unit_of[atom] >= 0
        }
        for atom, node in atoms.work:
            if self._unit_of[atom] < 0:
                self.crossing.atom(atom, atoms.costs[node.name].saved_bytes)
        for value in stored:
            self._add(value)
        self._peaks = _UnitPeaks(atoms.count, self._unit_of)
        for atom, node in atoms.work:
            self._peaks.node(atom, self.inside.get(node.name, 0), atoms.costs[node.name].workspace_bytes)

    def _add(self, value: StoredValue) -> None:
        """Count a value for the stages that keep it because of a unit, or because they send it."""
        n, unit_of, keeper, producer = self._atoms.count, self._unit_of, value.keeper, value.producer
        own = unit_of[producer] if producer >= 0 else -1
        if keeper is None or unit_of[keeper] < 0:
            value.correct(self.crossing, n)
        elif own < 0 or unit_of[keeper] != own:
            name = self._atoms.graph.nodes[value.keeper_position].name
            # a damaged graph may say that a call with work of its own is computed from the batch alone
            self.inside[name] = max(self.inside.get(name, 0) - value.size, 0)
        if producer < 0:
            return
        read = min((atom for atom in value.reads if unit_of[atom] >= 0 and unit_of[atom] != own), default=n)
        behind, sent = producer, value.last_sent
        if keeper is None or unit_of[keeper] < 0:
            # counted where the stage contains the keeper, and where it sends the value
            behind, until = max(behind, sent or behind, read), n if keeper is None else keeper
            self.crossing.rectangle(0, producer, behind + 1, until, value.size)
            return
        if sent is not None:
            self.crossing.rectangle(0, producer, producer + 1, sent, value.size)
            behind = sent
        self.crossing.rectangle(0, producer, max(behind, read) + 1, n, value.size)

    def tables(self) -> BlockTables:
        """Return the terms of every pair of cuts."""
        seconds = np.zeros(self._atoms.count + 1)
        for atom, node in self._atoms.work:
            if self._unit_of[atom] >= 0:
                seconds[atom + 1] += self._atoms.costs[node.name].forward_seconds
        before = seconds.cumsum()
        again = np.maximum(before[None, :] - before[:, None], 0.0)
        last = np.zeros_like(again)
        if not self.units.of_user:
            starts = np.array(self._unit_of)
            first = np.maximum(np.arange(len(before))[:, None], starts[None, :])
            last[:, 1:] = np.where(starts[None, :] >= 0, np.maximum(before[None, 1:] - before[first], 0.0), 0.0)
        return BlockTables(self.crossing.table(), self._peaks.table(), again, last)

    def along(self, edges: Sequence[int]) -> list[tuple[int, int]]:
        """Return (C, U) of the stages between successive ``edges`` (atoms, ascending)."""
        return list(zip(self.crossing.along(edges).tolist(), self._peaks.along(edges).tolist(), strict=True))


class _UnitPeaks(PeakWorkspace):
    """U of ``block_sums``, for all pairs of cuts or the stages of one plan."""

    def __init__(self, num_atoms: int, unit_of: Sequence[int]) -> None:
        super().__init__(num_atoms)
        # by atom, its first atom from which on activations exist together
        self._first = np.array([unit if unit >= 0 else atom for atom, unit in enumerate(unit_of)], dtype=np.int64)

    def table(self) -> Array:
        """Return the terms of all pairs, shape (n + 1, n + 1)."""
        n = len(self._highest)
        places = np.arange(n + 1)[:, None]
        before = self._saved.cumsum().astype(np.float64)
        own = self._highest[None, :] - before[np.maximum(places, self._first[None, :])]
        own[np.arange(n)[None, :] < places] = -np.inf
        table = np.zeros((n + 1, n + 1))
        table[:, 1:] = np.maximum.accumulate(own, axis=1)
        return np.maximum(table, 0.0)

    def along(self, edges: Sequence[int]) -> Whole:
        """Return the terms of the stages between successive ``edges`` (atoms, ascending)."""
        starts = np.array(edges[:-1], dtype=np.int64)
        of_stage = np.repeat(starts, np.diff(np.array(edges)))
        own = self._highest - self._saved.cumsum()[np.maximum(of_stage, self._first)]
        peaks: Whole = np.maximum(np.maximum.reduceat(own, starts), 0)
        return peaks
