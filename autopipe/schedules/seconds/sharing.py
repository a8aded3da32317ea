"""Ranks that share the cores of their host: while more of them work than there are cores, they take turns.

All of them then work at the same rate, as under a fair scheduler: time passes ``ranks at work / cores`` times as slowly
as with a core for each. The order of the simulated events stays as it is.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

Interval = tuple[float, float]


def shared_clock(work: Sequence[Interval], cores: float) -> Callable[[float], float]:
    """Return a function from a time with a core for each rank to the time with ``cores`` for all of them.

    ``work``: when a rank works, from and to, for all ranks.
    """
    changes: dict[float, int] = {}
    for start, end in work:
        if end > start:
            changes[start] = changes.get(start, 0) + 1
            changes[end] = changes.get(end, 0) - 1
    before = sorted(changes)
    after: list[float] = []
    rates: list[float] = []
    active = 0
    now = before[0] if before else 0.0
    for index, time in enumerate(before):
        if index:
            now += (time - before[index - 1]) * rates[-1]
        active += changes[time]
        after.append(now)
        rates.append(max(1.0, active / cores))

    def at(time: float) -> float:
        index = bisect.bisect_right(before, time) - 1
        return time if index < 0 else after[index] + (time - before[index]) * rates[index]

    return at
