"""The remaining time of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopipe.report.text import in_minutes

# no estimate before this many steps and seconds
LEAST_STEPS, LEAST_SECONDS = 2, 3.0


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
