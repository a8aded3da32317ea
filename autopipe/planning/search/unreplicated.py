"""The best straight pipeline: p stages in a row, one rank each, the slowest as fast as can be. Exact.

With t_k(i, j) the seconds of stage k on atoms i..j-1 (its device's speed, its links, its memory limit: infinite where
it does not fit)::

    best_k(i) = min over j of max(t_k(i, j), best_{k+1}(j)),      best_p(n) = 0

All pairs of one k are one array operation; O(p n^2) altogether. Among equally good plans the one with the earliest
cuts is taken: walking forward, the first j whose stage and rest stay within the optimum.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autopipe.planning.cost.pair_sum import Array


def unreplicated_cuts(
    num_atoms: int, num_stages: int, stage_table: Callable[[int], Array]
) -> tuple[float, tuple[int, ...]]:
    """Return (the slowest stage's cost, the atoms where stages 1..p-1 begin); infinite cost and no cuts if none fits.

    ``stage_table(k)``: the cost of stage k for every pair (i, j), shape (n + 1, n + 1).
    """
    above = np.triu(np.ones((num_atoms + 1, num_atoms + 1), dtype=bool), k=1)
    rest = np.full((num_stages + 1, num_atoms + 1), np.inf)
    rest[num_stages, num_atoms] = 0.0
    for stage in range(num_stages - 1, -1, -1):
        worst = np.where(above, np.maximum(stage_table(stage), rest[stage + 1]), np.inf)
        rest[stage] = worst.min(axis=1)
    optimum = float(rest[0, 0])
    if not np.isfinite(optimum):
        return np.inf, ()
    starts, at = [], 0
    for stage in range(num_stages - 1):
        worst = np.maximum(stage_table(stage)[at], rest[stage + 1])
        at += 1 + int(np.argmax(worst[at + 1 :] <= optimum))
        starts.append(at)
    return optimum, tuple(starts)
