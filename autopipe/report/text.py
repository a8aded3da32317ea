"""Numbers for people, with their unit."""

from __future__ import annotations

from collections.abc import Sequence

_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def in_bytes(count: float) -> str:
    """Return ``1.50 GiB``, ``12.0 MiB``, ``34 B``."""
    for size, unit in _BYTES:
        if abs(count) >= size:
            return f"{_three(count / size)} {unit}"
    return f"{count:.0f} B"


def in_seconds(seconds: float) -> str:
    """Return ``1.25 s``, ``3.40 ms``, ``12.0 us``."""
    for size, unit in _SECONDS:
        if abs(seconds) >= size:
            return f"{_three(seconds / size)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e9:.0f} ns"


def in_minutes(seconds: float) -> str:
    """Return a time to wait: ``45 s``, ``12 min``, ``3.4 h``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def _three(value: float) -> str:
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"


def in_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers, runs of three and more as ``4-7``: ``0,1,4-7``."""
    parts: list[str] = []
    start = 0
    for place in range(1, len(numbers) + 1):
        if place < len(numbers) and numbers[place] == numbers[place - 1] + 1:
            continue
        run = numbers[start:place]
        parts.extend([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))
        start = place
    return ",".join(parts)
