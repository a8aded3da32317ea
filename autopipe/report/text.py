"""Human-readable numbers, and the remaining time of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# no estimate before this many steps and seconds
LEAST_STEPS, LEAST_SECONDS = 2, 3.0


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


def seconds_left(start: Mapping[str, Any], step: Mapping[str, Any]) -> float | None:
    """Return the estimated seconds of the remaining steps, from the mean so far; None if it is not known yet."""
    if not start.get("steps") or step["seconds"] < LEAST_SECONDS:
        return None
    done = step["step"] + 1 - start["start_step"]
    if done < LEAST_STEPS:
        return None
    return float(step["seconds"] / done * max(start["steps"] - step["step"] - 1, 0))


def time_to_go(start: Mapping[str, Any], step: Mapping[str, Any]) -> str:
    """Return the remaining time, ``12 min left``, or the rate of steps if the length of the data is unknown.

    "" if neither is known yet.
    """
    left = seconds_left(start, step)
    if left is not None:
        return f"{in_minutes(left)} left" if left else ""
    done = step["step"] + 1 - start.get("start_step", 0)
    if not start or start.get("steps") or step["seconds"] < LEAST_SECONDS or done < LEAST_STEPS:
        return ""
    return f"unknown length: {done / step['seconds']:.3g} steps/s"
