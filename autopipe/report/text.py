"""Human-readable numbers."""

from __future__ import annotations

from collections.abc import Sequence


def in_minutes(seconds: float) -> str:
    """Return a waiting time: ``45 s``, ``12 min``, ``3.4 h``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def in_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers, with runs of three or more as ranges: ``0,1,4-7``."""
    parts: list[str] = []
    start = 0
    for place in range(1, len(numbers) + 1):
        if place < len(numbers) and numbers[place] == numbers[place - 1] + 1:
            continue
        run = numbers[start:place]
        parts.extend([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))
        start = place
    return ",".join(parts)
