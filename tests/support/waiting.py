"""Waiting for other processes, with time limits that take the load of the machine into account."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable


def short_pause(seconds: float = 0.05) -> None:
    """Wait between two looks at another process."""
    select.select([], [], [], seconds)


def under_load(seconds: float) -> float:
    """Return a time limit that holds on an idle machine, extended by the load of this one."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def wait_until(holds: Callable[[], object], seconds: float, why: Callable[[], object] = str) -> None:
    """Wait until a condition holds. Raises: AssertionError with ``why()`` after so many seconds of an idle machine."""
    end = time.monotonic() + under_load(seconds)
    while not holds():
        assert time.monotonic() < end, why()
        short_pause()
