"""How many jobs of a sweep share a device, and the token with which they alternate at the boundaries of shards."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from autopipe.errors import RunError
from autopipe.report.text import in_minutes
from autopipe.sweep.file import AUTO
from autopipe.sweep.job_table import Board, Entry
from autopipe.sweep.simulator import ModelJob, bound, makespan, most_places, simulate
from autopipe.sweep.token_keeper import TokenKeeper

# what a lease costs that begins later: its stop and its start
MOVE_SECONDS = 2.0
# leases of a simulation that decides, one after the other: more of them change nothing but its time
_MOST_LEASES = 50
# shards of all jobs that share devices, in a simulation: of more, several count as one
_MOST_SHARDS = 1000


def places_wanted(stored: int, wanted: int | None) -> int:
    """Return how many jobs may share a device, or ``AUTO``.

    ``stored``: what an earlier invocation of the sweep chose, 0 without one; ``wanted``: the option, else that of the
    file, else None.

    Raises: RunError if they differ: the plans of the jobs that have begun use a part of the memory.
    """
    if stored and wanted not in (None, AUTO, stored):
        raise RunError(
            f"{stored} jobs a device were chosen when the sweep began, and now {wanted}",
            where="jobs-per-device",
            remedy=f"resume it with --jobs-per-device {stored}, or choose another --sweep-dir",
        )
    return stored or (1 if wanted is None else wanted)


def as_models(entries: Iterable[Entry], *, could: bool = False) -> list[ModelJob]:
    """Return what is left of those jobs whose lengths are known, as the simulation takes it.

    ``could``: jobs that could share their devices do.
    """
    models = []
    for entry in entries:
        structure = entry.structure
        model = entry.as_model(shares=structure.can_share if could else structure.shares)
        models += [] if model is None else [model]
    together = math.ceil(sum(model.shards for model in models if model.shares) / _MOST_SHARDS)
    return [_coarser(model, together) if model.shares else model for model in models]


def _coarser(job: ModelJob, together: int) -> ModelJob:
    """Return a job with several shards as one. Its seconds of computation and of copies stay the same."""
    shards = math.ceil(job.shards / together)
    scale = job.shards / shards
    return dataclasses.replace(job, compute=job.compute * scale, copy=job.copy * scale, shards=shards)


class Sharing:
    """The places of the devices of a sweep."""

    def __init__(self, board: Board, devices: Sequence[int], lease: float, wanted: int) -> None:
        """``wanted``: places of a device, or ``AUTO``; ``lease``: seconds."""
        self._board, self._devices, self._lease = board, devices, lease
        self._keeper: TokenKeeper | None = None
        self.places = max(wanted, 1)
        self.is_decided = wanted != AUTO
        if self.is_decided:
            self._divide()

    @property
    def chosen(self) -> int:
        """The places of a device; 0: not decided yet."""
        return self.places if self.is_decided else 0

    def decide(self) -> str:
        """Choose the number of places once all structures are prepared. Return a note if jobs will share devices."""
        unfinished = self._board.unfinished()
        if self.is_decided or not all(entry.structure.prepared for entry in unfinished):
            return ""
        self.is_decided = True
        models = as_models(unfinished, could=True)
        if not any(model.shares for model in models):
            return ""
        lease = max(self._lease, bound(models, len(self._devices)) / _MOST_LEASES)
        self.places = most_places(models, self._devices, lease=lease, cost=MOVE_SECONDS)
        self._divide()
        if self.places == 1:
            return ""
        alone = makespan(simulate(models, self._devices, lease=lease, cost=MOVE_SECONDS))
        return f"up to {self.places} jobs share a device; predicted for one a device: {in_minutes(alone)}"

    def _divide(self) -> None:
        for structure in self._board.structures:
            structure.prepare_part(self.places)

    def may_begin(self, entry: Entry) -> bool:
        """Return whether a job need not wait for the decision."""
        return self.is_decided or not entry.structure.can_share

    def each(self, entry: Entry) -> int:
        """Return how many places of a device a job takes."""
        return 1 if entry.structure.shares else self.places

    def taken(self) -> Counter[int]:
        """Return the places of each device that running jobs take."""
        taken: Counter[int] = Counter()
        for entry in self._board.running():
            for device in entry.devices:
                taken[device] += self.each(entry)
        return taken

    def address(self, entry: Entry, on: Sequence[int]) -> str:
        """Return where a job takes the token of its device; "" if it has the device for itself."""
        if self.places == 1 or not entry.structure.shares:
            return ""
        if self._keeper is None:
            self._keeper = TokenKeeper(Path(self._board.folder.path), self._remaining)
        return self._keeper.address(on[0], entry.job.number)

    def _remaining(self, job: int) -> float:
        entries = self._board.entries
        if not 1 <= job <= len(entries):
            raise KeyError(job)
        return entries[job - 1].remaining

    def close(self) -> None:
        """End the keeper of the tokens."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
