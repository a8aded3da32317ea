"""``Tables``: the seconds, traffic and bytes of a stage for every pair of cuts. ``pair_sum`` explains how.

``Sized`` has them and the rest that the searches need of a graph at one microbatch size. All schedules and options that
they try share it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopipe.ir.cuts import Cuts
from autopipe.ir.profile import Measurement, Profile
from autopipe.planning.cost.atoms import Atoms
from autopipe.planning.cost.block_sums import BlockTables
from autopipe.planning.cost.byte_sums import ByteSums, ByteTables, StageTerms
from autopipe.planning.cost.pair_sum import Array, PairSum

# profiles whose tables are kept, for instance two orders of the layers of a file
_MOST_PROFILES = 2
# pairs of cuts of all tables that are kept for one profile
_MOST_PAIRS = 4e6


@dataclass(frozen=True)
class Tables:
    """Per microbatch, for a stage of atoms i..j-1: arrays of shape (n + 1, n + 1) in seconds and bytes."""

    edges: tuple[int, ...]  # the node position of every atom's start, and the end
    forward_seconds: Array  # with the input-only nodes that the stage computes itself
    backward_seconds: Array
    received: Array  # bytes; a value whose gradient is sent back counts twice
    sent: Array  # bytes, likewise
    tied_bytes: Array  # trained parameters that other stages use as well
    memory: ByteTables

    @property
    def num_atoms(self) -> int:
        """The number of atoms: one more than the legal cuts."""
        return len(self.edges) - 1


def build_tables(atoms: Atoms, sums: ByteSums) -> Tables:
    """Return the tables of a graph at one microbatch size."""
    received, sent = _messages(atoms)
    return Tables(
        atoms.edges,
        _seconds(atoms, "forward_seconds", lambda atom: atom, atoms.count),
        _seconds(atoms, "backward_seconds", lambda atom: atom, atoms.count),
        received.table(),
        sent.table(),
        sums.tied.table(),
        sums.tables(),
    )


def tables_without(tables: Tables, atoms: Atoms, position: int) -> Tables:
    """Return the tables without the cut at a node position, equal to those of a graph without it.

    ``atoms``: of ``tables``. Bytes are whole numbers, so their tables lose a row and a column. Seconds are added again.
    """
    cut, count = tables.edges.index(position), tables.num_atoms - 1

    def fewer(table: Array) -> Array:
        rest: Array = np.delete(np.delete(table, cut, axis=0), cut, axis=1)
        return rest

    def merged(atom: int) -> int:
        return atom - (atom >= cut)

    memory = {field.name: fewer(getattr(tables.memory, field.name)) for field in dataclasses.fields(tables.memory)}
    return Tables(
        tuple(edge for edge in tables.edges if edge != position),
        _seconds(atoms, "forward_seconds", merged, count),
        _seconds(atoms, "backward_seconds", merged, count),
        fewer(tables.received),
        fewer(tables.sent),
        fewer(tables.tied_bytes),
        dataclasses.replace(tables.memory, **memory),
    )


def _messages(atoms: Atoms) -> tuple[PairSum, PairSum]:
    """Return the bytes received and sent, gradients included."""
    received, sent = PairSum(atoms.count), PairSum(atoms.count)
    for producer, node in atoms.work:
        later = atoms.later_readers(node.name, producer)
        if node.spec is None or not later:
            continue
        both_ways = atoms.num_bytes(node.name) * (2 if node.spec.requires_grad else 1)
        received.distinct(later, both_ways, after=producer)
        sent.rectangle(0, producer, producer + 1, max(later), both_ways)
    return received, sent


def _seconds(atoms: Atoms, field: str, merged: Callable[[int], int], count: int) -> Array:
    """Return the seconds of every pair of cuts. ``merged``: the atom, of ``count``, that contains one of ``atoms``."""
    extra = PairSum(count)
    for node in atoms.copied:
        extra.distinct(map(merged, atoms.reads[node.name]), getattr(atoms.costs[node.name], field))
    at = [merged(atom) + 1 for atom, _ in atoms.work]
    seconds = [getattr(atoms.costs[node.name], field) for _, node in atoms.work]
    prefix = np.bincount(at, weights=seconds, minlength=count + 1).cumsum()
    work: Array = np.maximum(prefix[None, :] - prefix[:, None], 0.0)
    return work + extra.table()


class Sized:
    """A graph at one microbatch size. Each part is computed when it is first used."""

    def __init__(self, profile: Profile, cuts: Cuts, microbatch_size: int) -> None:
        self.profile, self.cuts, self.microbatch_size = profile, cuts, microbatch_size
        # the first atoms of the stages of the best plan, by what determines it (``Problem.searched_as``)
        self.searched: dict[Any, tuple[float, tuple[int, ...]]] = {}
        self.searched_without: dict[int, dict[Any, tuple[float, tuple[int, ...]]]] = {}  # by the cut that is excluded

    @functools.cached_property
    def measurement(self) -> Measurement:
        """The node costs."""
        return self.profile.at(self.microbatch_size)

    @functools.cached_property
    def atoms(self) -> Atoms:
        """The graph, divided at the cuts."""
        return Atoms(self.profile.graph, self.cuts, self.measurement)

    @functools.cached_property
    def byte_sums(self) -> ByteSums:
        """The bytes of every stage."""
        return ByteSums(self.atoms, self.profile.optimizer_bytes_per_byte)

    @functools.cached_property
    def tables(self) -> Tables:
        """The stage tables."""
        return build_tables(self.atoms, self.byte_sums)

    @functools.cached_property
    def block_tables(self) -> BlockTables:
        """The stage tables of recompute by block."""
        return self.byte_sums.by_block.tables()

    def terms(self, starts: Sequence[int], *, by_block: bool = False) -> list[StageTerms]:
        """Return the bytes of the stages that start at these node positions: see ``ByteSums.along``."""
        return self.byte_sums.along(starts, by_block=by_block)


class _SizedWithout(Sized):
    """The same without one cut. Its tables lack a row and a column; only what depends on units is computed again."""

    def __init__(self, whole: Sized, cuts: Cuts, position: int) -> None:
        super().__init__(whole.profile, cuts, whole.microbatch_size)
        self._whole, self._position = whole, position
        self.searched = whole.searched_without.setdefault(position, {})

    @functools.cached_property
    def measurement(self) -> Measurement:
        """The node costs."""
        return self._whole.measurement

    @functools.cached_property
    def tables(self) -> Tables:
        """The stage tables."""
        return tables_without(self._whole.tables, self._whole.atoms, self._position)

    def terms(self, starts: Sequence[int], *, by_block: bool = False) -> list[StageTerms]:
        """Return the bytes of the stages that start at these node positions: see ``ByteSums.along``."""
        return (self if by_block else self._whole).byte_sums.along(starts, by_block=by_block)


class CutsWithout(Cuts):
    """Cuts without one of their legal positions."""

    def __init__(self, cuts: Cuts, position: int) -> None:
        super().__init__(cuts.graph)
        self.cuts, self.position = cuts, position

    @functools.cached_property
    def legal(self) -> tuple[int, ...]:
        """The legal positions, without that one."""
        return tuple(position for position in self.cuts.legal if position != self.position)

    @functools.cached_property
    def crossing(self) -> tuple[tuple[str, ...], ...]:
        """As of all cuts."""
        return self.cuts.crossing


class _Kept:
    """What is kept of one profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.cuts = Cuts(profile.graph)
        self.sized: dict[tuple[int, int], Sized] = {}  # by identity of the cuts, and microbatch size
        self.work_seconds: dict[int, float] = {}  # by microbatch size


_RECENT: list[_Kept] = []  # the newest last


def _kept(profile: Profile) -> _Kept:
    kept = next((each for each in _RECENT if each.profile is profile), None) or _Kept(profile)
    _RECENT[:] = [*(each for each in _RECENT if each is not kept), kept][-_MOST_PROFILES:]
    return kept


def cuts_of(profile: Profile) -> Cuts:
    """Return the cuts of a profile's graph, the same object for searches that follow one another."""
    return _kept(profile).cuts


def sized(profile: Profile, cuts: Cuts, microbatch_size: int) -> Sized:
    """Return a profile's graph with these cuts at one microbatch size, which may have been computed before."""
    if isinstance(cuts, CutsWithout):
        return _SizedWithout(sized(profile, cuts.cuts, microbatch_size), cuts, cuts.position)
    known, key = _kept(profile).sized, (id(cuts), microbatch_size)
    if key in known and known[key].cuts is cuts:
        return known[key]
    most = int(_MOST_PAIRS // (len(cuts.legal) + 2) ** 2)
    for oldest in list(known)[: max(len(known) + 1 - most, 0)]:
        del known[oldest]
    known[key] = Sized(profile, cuts, microbatch_size)
    return known[key]


def work_seconds(profile: Profile, microbatch_size: int) -> float:
    """Return the seconds of the forward and backward of all nodes, for a microbatch of this size."""
    known = _kept(profile).work_seconds
    if microbatch_size not in known:
        costs = profile.at(microbatch_size).costs.values()
        known[microbatch_size] = math.fsum(cost.forward_seconds + cost.backward_seconds for cost in costs)
    return known[microbatch_size]
