"""Heartbeats: a small shared file in which each rank records its current work; the supervisor reads it at any time.

A rank that was killed or hangs cannot report where it was, so it records that beforehand, for every instruction (about
a microsecond each).

The file also carries the fields of ``launch.rank.graceful_stop``: how far each rank has committed to run, and where the
run stops.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_RECORD = struct.Struct("<QQ?x64s")
_SIZE = 128
# native alignment: written at once, so that no reader sees half a number
_WORD = struct.Struct("@Q")
_BOUND = 96


@dataclass(frozen=True, slots=True)
class Beat:
    """The last record of a rank."""

    count: int  # of records so far
    seconds: float  # when it was written, in monotonic time
    waiting: bool  # whether the rank waits for another
    doing: str  # its current instruction or work
    bound: int = 0  # the minibatch before which it may stop next; 0 before the first
    stop: int = -1  # the proposed stop when ``bound`` was read; -1: none


class Heartbeats:
    """The mapped file. The supervisor creates it (``create=True``), and each rank opens it."""

    def __init__(self, path: Path, num_ranks: int, *, create: bool = False) -> None:
        """Map the file."""
        if create:
            path.write_bytes(bytes(_SIZE * (num_ranks + 1)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE * (num_ranks + 1))
        self._words = _SIZE * num_ranks
        self._count = 0

    def note(self, rank: int, doing: str, waiting: bool) -> None:
        """Record the current work of a rank."""
        self._count += 1
        text = doing.encode("ascii", "replace")[:64]
        record = _RECORD.pack(self._count, time.monotonic_ns(), waiting, text)
        # one copy: pack_into clears the record first, and a rank that is killed then would leave an empty one
        self._map[rank * _SIZE : rank * _SIZE + _RECORD.size] = record

    def read(self, rank: int) -> Beat:
        """Return the last record of a rank."""
        count, nanoseconds, waiting, text = _RECORD.unpack_from(self._map, rank * _SIZE)
        stop = self.stop()  # before ``bound`` is read: see launch.rank.graceful_stop
        bound = _WORD.unpack_from(self._map, rank * _SIZE + _BOUND)[0]
        doing = text.rstrip(b"\0").decode("ascii", "replace")
        return Beat(count, nanoseconds / 1e9, waiting, doing, bound, -1 if stop is None else stop[0])

    def bind(self, rank: int, end: int) -> None:
        """Commit a rank to run up to minibatch ``end``."""
        _WORD.pack_into(self._map, rank * _SIZE + _BOUND, end)

    def set_stop(self, proposed: int, agreed: bool) -> None:
        """Record the minibatch before which the run stops, and whether no rank is past it."""
        _WORD.pack_into(self._map, self._words, proposed + 1)
        if agreed:
            _WORD.pack_into(self._map, self._words + 8, proposed + 1)

    def stop(self) -> tuple[int, bool] | None:
        """Return the minibatch before which the run stops, and whether that is agreed; None if it does not stop."""
        proposed, agreed = (_WORD.unpack_from(self._map, self._words + offset)[0] for offset in (0, 8))
        return (proposed - 1, agreed == proposed) if proposed else None

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
