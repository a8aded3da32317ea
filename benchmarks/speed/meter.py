"""What a rank measures of itself: processor time, wall time and memory, at each minibatch that it reads.

The data of the models in ``models/`` passes through ``metered``. So autopipe and its peers are measured by the same
code, in the processes that compute. Other processes, which read the data to examine it, write nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

FOLDER = "AUTOPIPE_SPEED_METER"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_EVERY = 25  # minibatches between two readings of the memory


@dataclass(frozen=True, slots=True)
class Reading:
    """A rank when it asks for a minibatch."""

    processor: float  # seconds, user and system, of all threads of the process
    wall: float  # seconds of the monotonic clock, equal on all ranks of a machine
    memory: int  # bytes resident; 0 if not read


def metered(items: Iterable[T]) -> Iterator[T]:
    """Yield the items. In a process called ``rank K``, append a reading to ``rank_K`` of the folder before each."""
    folder, name = os.environ.get(FOLDER), multiprocessing.current_process().name
    if not folder or not name.startswith("rank "):
        yield from items
        return
    with (Path(folder) / name.replace(" ", "_")).open("a", encoding="ascii", buffering=1) as file:
        for number, item in enumerate(items):
            memory = 0 if number % _EVERY else _resident_bytes()
            file.write(f"{time.process_time()} {time.perf_counter()} {memory}\n")
            yield item


def readings(folder: Path) -> list[list[Reading]]:
    """Return the readings of every rank."""
    ranks = []
    for path in sorted(folder.glob("rank_*"), key=lambda path: int(path.name.partition("_")[2])):
        rows = (line.split() for line in path.read_text(encoding="ascii").splitlines())
        ranks.append([Reading(float(row[0]), float(row[1]), int(row[2])) for row in rows])
    return ranks


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
