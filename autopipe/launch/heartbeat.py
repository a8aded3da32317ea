"""Heartbeats: a small shared file in which each rank notes what it is doing; the supervisor reads it at any time.

A rank that was killed or hangs cannot say where it was, so it says so beforehand, for every instruction (about a
microsecond each).
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_RECORD = struct.Struct("<QQ?x64s")
_SIZE = 128


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank was doing: how many notes it has made, when the last (monotonic seconds), and whether it waits."""

    count: int
    seconds: float
    waiting: bool
    doing: str


class Heartbeats:
    """The file, mapped. ``Heartbeats(path, n, create=True)`` by the supervisor, without ``create`` by each rank."""

    def __init__(self, path: Path, num_ranks: int, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(_SIZE * num_ranks))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE * num_ranks)
        self._count = 0

    def note(self, rank: int, doing: str, waiting: bool) -> None:
        """Write down what a rank is doing now."""
        self._count += 1
        text = doing.encode("ascii", "replace")[:64]
        _RECORD.pack_into(self._map, rank * _SIZE, self._count, time.monotonic_ns(), waiting, text)

    def read(self, rank: int) -> Beat:
        """Return a rank's last note."""
        count, nanoseconds, waiting, text = _RECORD.unpack_from(self._map, rank * _SIZE)
        return Beat(count, nanoseconds / 1e9, waiting, text.rstrip(b"\0").decode("ascii", "replace"))

    def close(self) -> None:
        """Unmap."""
        self._map.close()
