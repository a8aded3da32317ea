"""``PairSum``: the sum of what each stage holds, for every pair of cuts at once or for the stages of one plan.

A stage is a run of atoms ``i..j-1``. What it holds is not a sum over its atoms: a value read twice in a stage is
received once, a parameter read by two layers is stored once, an input-only node that three layers read is computed
once. Each of these is a count of distinct things, and the pairs (i, j) for which a thing counts are rectangles in the
plane of pairs:

- a thing used at atoms u1 < u2 < ... counts for (i, j) if some u has i <= u < j (``distinct``);
- a value produced at atom a and used later is received by (i, j) if a < i and the stage has a use (``distinct``, after
  a);
- it is sent by (i, j) if i <= a < j and there is a use at or behind j (``rectangle``).

The rectangles are the only definition of a term. ``table`` adds them for all pairs in O(rectangles + n^2), so that the
search reads the cost of a stage in O(1); ``along`` adds them for the p stages of a plan in O(rectangles log p). Bytes
are whole numbers, and a float64 holds sums of them exactly below 2**53: the two are equal, in whatever order they add.

``StoredValue`` is one memory that a cut can separate from its readers, and who counts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopipe.planning.cost.atoms import Atoms

Array = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]


class PairSum:
    """Rectangles of weights over the pairs (i, j), 0 <= i, j <= n, and their sums."""

    def __init__(self, num_atoms: int) -> None:
        self._n = num_atoms
        self._bounds: list[tuple[int, int, int, int]] = []
        self._weights: list[float] = []

    def rectangle(self, i_from: int, i_to: int, j_from: int, j_to: int, weight: float) -> None:
        """Add ``weight`` to every (i, j) with i_from <= i <= i_to and j_from <= j <= j_to."""
        if i_from > i_to or j_from > j_to or not weight:
            return
        self._bounds.append((i_from, i_to, j_from, j_to))
        self._weights.append(weight)

    def distinct(self, uses: Iterable[int], weight: float, after: int = -1) -> None:
        """Add ``weight`` once to every (i, j) with i > ``after`` that contains one of ``uses`` (atoms)."""
        previous = after
        for use in sorted(set(uses)):
            self.rectangle(previous + 1, use, use + 1, self._n, weight)
            previous = max(previous, use)

    def atom(self, atom: int, weight: float) -> None:
        """Add ``weight`` to every (i, j) that contains the atom."""
        self.rectangle(0, atom, atom + 1, self._n, weight)

    def table(self, base: Array | float = 0.0) -> Array:
        """Return the sums of all pairs, shape (n + 1, n + 1), on top of ``base``; entries with i >= j are undefined."""
        width = self._n + 2
        bounds = np.array(self._bounds, dtype=np.int64).reshape(-1, 4)
        i_from, i_to, j_from, j_to = bounds.T
        ends = (i_from, j_from), (i_to + 1, j_from), (i_from, j_to + 1), (i_to + 1, j_to + 1)
        corners = np.stack([i * width + j for i, j in ends], axis=1)
        signed = np.outer(np.array(self._weights, dtype=np.float64), (1.0, -1.0, -1.0, 1.0))
        changes = np.bincount(corners.ravel(), weights=signed.ravel(), minlength=width * width).reshape(width, width)
        total: Array = changes.cumsum(axis=0).cumsum(axis=1)
        return np.maximum(total[:-1, :-1] + base, 0.0)

    def along(self, edges: Sequence[int]) -> Whole:
        """Return the sums of the stages between successive ``edges`` (atoms, ascending). Weights must be whole."""
        starts, stops = np.array(edges[:-1], dtype=np.int64), np.array(edges[1:], dtype=np.int64)
        bounds, weights = np.array(self._bounds, dtype=np.int64).reshape(-1, 4), np.array(self._weights, dtype=np.int64)
        i_from, i_to, j_from, j_to = bounds.T
        # starts and stops both ascend, so the stages in a rectangle are a run
        first = np.maximum(np.searchsorted(starts, i_from), np.searchsorted(stops, j_from))
        last = np.minimum(np.searchsorted(starts, i_to, "right"), np.searchsorted(stops, j_to, "right"))
        inside = first < last
        changes = np.zeros(len(starts) + 1, dtype=np.int64)
        np.add.at(changes, first[inside], weights[inside])
        np.subtract.at(changes, last[inside], weights[inside])
        sums: Whole = np.maximum(changes.cumsum()[:-1], 0)
        return sums


class PeakWorkspace:
    """``max(0, max_x (w_x + saved up to x) - saved of all)`` over the nodes x of a stage: the bytes X of ``memory``."""

    def __init__(self, num_atoms: int) -> None:
        self._saved = np.zeros(num_atoms + 1, dtype=np.int64)  # by atom a, at a + 1
        self._highest = np.full(num_atoms, -(2**62), dtype=np.int64)  # of each atom, the highest w_x + saved up to x
        self._before = 0

    def node(self, atom: int, saved: int, workspace: int) -> None:
        """Add the next node, in the order of the graph."""
        self._before += saved
        self._highest[atom] = max(int(self._highest[atom]), workspace + self._before)
        self._saved[atom + 1] += saved

    def table(self) -> Array:
        """Return the workspace of all pairs, shape (n + 1, n + 1)."""
        n = len(self._highest)
        # row i: the running maximum from atom i on
        behind = np.arange(n)[None, :] >= np.arange(n + 1)[:, None]
        own = np.where(behind, self._highest[None, :].astype(np.float64), -np.inf)
        table = np.zeros((n + 1, n + 1))
        table[:, 1:] = np.maximum.accumulate(own, axis=1) - self._saved.cumsum()[None, 1:]
        return np.maximum(table, 0.0)

    def along(self, edges: Sequence[int]) -> Whole:
        """Return the workspaces of the stages between successive ``edges`` (atoms, ascending)."""
        highest = np.maximum.reduceat(self._highest, np.array(edges[:-1], dtype=np.int64))
        workspaces: Whole = np.maximum(highest - self._saved.cumsum()[list(edges[1:])], 0)
        return workspaces


class Largest:
    """The largest of the amounts at the atoms of a stage, or 0."""

    def __init__(self, num_atoms: int) -> None:
        self._amounts = np.zeros(num_atoms, dtype=np.int64)

    def add(self, atom: int, amount: int) -> None:
        """Add an amount at an atom."""
        self._amounts[atom] = max(int(self._amounts[atom]), amount)

    def table(self) -> Array:
        """Return the largest amounts of all pairs, shape (n + 1, n + 1)."""
        n = len(self._amounts)
        behind = np.arange(n)[None, :] >= np.arange(n + 1)[:, None]
        table = np.zeros((n + 1, n + 1))
        table[:, 1:] = np.maximum.accumulate(np.where(behind, self._amounts[None, :], 0), axis=1)
        return table

    def along(self, edges: Sequence[int]) -> Whole:
        """Return the largest amounts of the stages between successive ``edges`` (atoms, ascending)."""
        largest: Whole = np.maximum.reduceat(self._amounts, np.array(edges[:-1], dtype=np.int64))
        return largest


@dataclass
class StoredValue:
    """One memory, under all its names, and how a cut changes who counts it.

    A profile counts a tensor at the first node that keeps it for its backward. A stage that has the memory from
    elsewhere counts it in ``kept`` instead. A stage that sends a value keeps it until the backward that starts from it,
    even if none of its own nodes does.
    """

    producer: int  # the atom that produces it; -1: every stage has it
    size: int  # bytes
    keeper: int | None  # the atom of the first node that keeps it; None if no node does
    keeper_position: int = -1  # the position of that node
    reads: set[int] = field(default_factory=set)  # the later atoms that read it
    # for each name through which a gradient comes back: the atom that produces it and the last one that reads it
    sent: list[tuple[int, int]] = field(default_factory=list)

    @property
    def last_sent(self) -> int | None:
        """The last atom to which it may be sent with a gradient; None if no gradient comes back."""
        return max((last for _, last in self.sent), default=None)

    def correct(self, saved: PairSum, num_atoms: int) -> None:
        """Correct the sum of what the nodes save."""
        if self.sent and self.producer >= 0:
            first, last = min(producer for producer, _ in self.sent), max(last for _, last in self.sent)
            last = last if self.keeper is None else min(last, self.keeper)
            saved.rectangle(0, self.producer, first + 1, last, self.size)
        if self.keeper is None or self.keeper <= self.producer:
            return
        saved.rectangle(self.producer + 1, self.keeper, self.keeper + 1, num_atoms, -self.size)
        # except for a stage that contains the keeper and reads the memory under no name
        before = max((atom for atom in self.reads if atom <= self.keeper), default=self.producer)
        behind = min((atom for atom in self.reads if atom > self.keeper), default=num_atoms)
        saved.rectangle(before + 1, self.keeper, self.keeper + 1, behind, self.size)


def stored_values(atoms: Atoms) -> Iterator[StoredValue]:
    """Yield the memory of all values that a cut can separate from their readers, once under all its names."""
    storage = atoms.cuts.storage
    keepers: dict[str, int] = {}
    for value, name in atoms.keepers.items():
        base, at = storage(value), atoms.graph.position[name]
        keepers[base] = min(at, keepers.get(base, at))
    values: dict[str, StoredValue] = {}
    names = [(entry.name, -1) for entry in atoms.graph.inputs] + [(node.name, -1) for node in atoms.copied]
    for name, producer in [*names, *((node.name, atom) for atom, node in atoms.work if node.spec is not None)]:
        later = atoms.later_readers(name, producer)
        if not later:
            continue
        base = storage(name)
        if base not in values:
            place = keepers.get(base)
            keeper = None if place is None else atoms.of_position[place]
            size, producer_atom = atoms.num_bytes(base), atoms.produced_at(base)
            values[base] = StoredValue(producer_atom, size, keeper, -1 if place is None else place)
        values[base].reads |= later
        if producer >= 0 and atoms.carries_gradient(name):
            values[base].sent.append((producer, max(later)))
    yield from values.values()
