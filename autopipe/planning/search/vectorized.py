"""``solver.least_ranks`` for numpy without numba: all ends of a stage at once. The results are the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopipe.planning.search import solver

Array = Any  # as in ``solver``


def least_ranks_by_rows(tables: Any, place: Array, rules: Array, T: float, g: Array) -> int:
    """Set g and return g[0], as ``solver.least_ranks`` does.

    Array operations compute lower bounds of the replicas of every stage. Only stages whose bound is lower than the best
    count are evaluated exactly, in the order of their bounds.
    """
    n, G, cap = len(g) - 1, int(rules[solver.RANKS]), int(rules[solver.MOST])
    ring = tables[solver.RING] / rules[solver.MICROBATCHES]
    speed, seconds = place[solver.SPEED, 0, 0], tables[solver.COMPUTE]
    g[n] = 0
    for i in range(n - 1, -1, -1):
        row = seconds[i, i + 1 :]
        stop = int(np.searchsorted(row, T * speed * min(G, cap) * (1 + 1e-9), side="right"))
        behind = g[i + 1 : i + 1 + stop]
        bounds = _least_counts(tables[solver.TIME][i, i + 1 : i + 1 + stop], ring[i, i + 1 : i + 1 + stop], T) + behind
        best = G + 1
        for k in np.argsort(bounds, kind="stable"):
            d = int(behind[k])
            if bounds[k] >= best:
                break
            most = min(best - 1 - d, cap)
            r = solver.least_replicas(tables, place, rules, i, i + 1 + int(k), d, most, T)
            best = d + r if r <= most else best
        g[i] = best
    return int(g[0])


def _least_counts(t: Array, k: Array, T: float) -> Array:
    """Return lower bounds of the replicas of stages with these t and k: the closed form of ``solver``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        counts = np.where(k < T, np.ceil((t - k) / (T - k) - 1e-9), np.inf)
    return np.where(t <= T, 1.0, np.maximum(counts, 1.0))
