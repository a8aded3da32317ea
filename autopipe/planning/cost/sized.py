"""``Sized``: what the searches need of a graph at one microbatch size, shared by the schedules and options they try."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from autopipe.ir.cuts import Cuts
from autopipe.ir.profile import Measurement, Profile
from autopipe.planning.cost.atoms import Atoms
from autopipe.planning.cost.block_sums import BlockTables
from autopipe.planning.cost.byte_sums import ByteSums, StageTerms
from autopipe.planning.cost.tables import Tables, build_tables, tables_without

# profiles whose tables are kept, for instance two orders of the layers of a file
_MOST_PROFILES = 2
# pairs of cuts of all tables that are kept for one profile
_MOST_PAIRS = 4e6


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


class SizedWithout(Sized):
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
        return SizedWithout(sized(profile, cuts.cuts, microbatch_size), cuts, cuts.position)
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
