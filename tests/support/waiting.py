"""Waiting for a condition that another process fulfils."""

from __future__ import annotations

import select
import time
from collections.abc import Callable


def short_pause(seconds: float = 0.05) -> None:
    """Wait between two looks at another process."""
    select.select([], [], [], seconds)


def wait_until(holds: Callable[[], object], seconds: float, why: Callable[[], object] = str) -> None:
    """Wait until a condition holds. Raises: AssertionError with ``why()`` after so many seconds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, why()
        short_pause()
