"""The exact search for p stages on one rank each: minimizes the time of the slowest stage.

t_k(i, j) are the seconds of stage k on atoms i..j-1, with the speed of its device and its links; infinite if it does
not fit::

    best_k(i) = min over j of max(t_k(i, j), best_{k+1}(j)),      best_p(n) = 0

All pairs of one k are one array operation; O(p n^2) in total. Of equally good plans, the result has the earliest cuts:
forwards from stage 0, the first j for which the stage and the rest stay within the optimum.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autopipe.planning.cost.pair_sum import Array


def unreplicated_cuts(
    num_atoms: int, num_stages: int, stage_table: Callable[[int], Array]
) -> tuple[float, tuple[int, ...]]:
    """Return (cost of the slowest stage, first atoms of stages 1..p-1); infinite cost and no cuts if none fits.

    ``stage_table(k)``: the cost of stage k for every pair (i, j), shape (n + 1, n + 1).
    """
    above = np.triu(np.ones((num_atoms + 1, num_atoms + 1), dtype=bool), k=1)
    rest = np.full((num_stages + 1, num_atoms + 1), np.inf)
    rest[num_stages, num_atoms] = 0.0
    masked: tuple[Array, Array] | None = None  # the table of the stage behind, and that table without empty stages
    for stage in range(num_stages - 1, -1, -1):
        table = stage_table(stage)
        if masked is None or masked[0] is not table:
            masked = table, np.where(above, table, np.inf)
        rest[stage] = np.maximum(masked[1], rest[stage + 1]).min(axis=1)
    optimum = float(rest[0, 0])
    if not np.isfinite(optimum):
        return np.inf, ()
    starts, at = [], 0
    for stage in range(num_stages - 1):
        worst = np.maximum(stage_table(stage)[at], rest[stage + 1])
        at += 1 + int(np.argmax(worst[at + 1 :] <= optimum))
        starts.append(at)
    return optimum, tuple(starts)
