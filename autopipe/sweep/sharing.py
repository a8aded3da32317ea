"""How many jobs of a sweep share a device, and the token with which they alternate at the boundaries of shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from autopipe.errors import RunError
from autopipe.sweep.board import Board, Entry
from autopipe.sweep.file import AUTO
from autopipe.sweep.scheduling.keeper import TokenKeeper
from autopipe.sweep.scheduling.simulator import most_places

# what a lease costs that begins later: its stop and its start
MOVE_SECONDS = 2.0


def places_wanted(stored: int, wanted: int | None) -> int:
    """Return how many jobs may share a device, or ``AUTO``.

    ``stored``: what an earlier invocation of the sweep chose, 0 without one; ``wanted``: the option, else that of the
    file, else None.

    Raises: RunError if they differ: the plans of the jobs that have begun use a part of the memory.
    """
    if stored and wanted not in (None, AUTO, stored):
        raise RunError(
            f"{wanted} jobs are to share a device, and the sweep began with {stored}",
            where="jobs-per-device",
            remedy=f"resume it with --jobs-per-device {stored}, or choose another --sweep-dir",
        )
    return stored or (1 if wanted is None else wanted)


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
        structures = self._board.structures
        if self.is_decided or not all(structure.prepared for structure in structures):
            return ""
        self.is_decided = True
        entries = self._board.unfinished()
        models = [m for entry in entries if (m := entry.as_model(shares=entry.structure.can_share)) is not None]
        if not any(model.shares for model in models):
            return ""
        self.places = most_places(models, self._devices, lease=self._lease, cost=MOVE_SECONDS)
        self._divide()
        return f"{self.places} jobs share a device: by the simulation, this is faster" if self.places > 1 else ""

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
        return self._board.entries[job - 1].remaining

    def close(self) -> None:
        """End the keeper of the tokens."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
