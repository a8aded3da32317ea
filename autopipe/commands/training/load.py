"""``Load``: how much of the cores of this process all programs use."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil


@dataclass(slots=True)
class Load:
    """Processor time between two moments."""

    _busy: float = 0.0  # of all programs, at the first moment
    _own: float = 0.0  # of this process
    _since: float = 0.0
    used: float = 0.0  # by all programs
    own: float = 0.0  # by this process
    seconds: float = 0.0

    def begin(self) -> None:
        """Note the first moment."""
        self._busy, self._own, self._since = _busy_seconds(), time.process_time(), time.perf_counter()

    def end(self) -> None:
        """Note the second moment. A later call moves it."""
        self.used, self.own = _busy_seconds() - self._busy, time.process_time() - self._own
        self.seconds = time.perf_counter() - self._since

    def of_others(self, ours: float) -> float:
        """Return the cores that other programs used on average. ``ours``: processor time of the ranks."""
        return max(self.used - self.own - ours, 0.0) / self.seconds if self.seconds else 0.0


def _busy_seconds() -> float:
    """Return the processor time of all programs on the cores that this process may use."""
    cores = psutil.cpu_times(percpu=True)
    permitted = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(cores))
    times = [core for index, core in enumerate(cores) if index in permitted]
    return float(sum(core.user + core.system + getattr(core, "nice", 0.0) for core in times))
