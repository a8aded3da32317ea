"""The two engines that probe a bottleneck T; ``bottleneck`` chooses T. Both work on rows or blocks of the tables.

- ``least_ranks`` (equal devices and links): the fewest ranks for atoms i.. with every tau <= T. Fewer ranks behind a
  stage are never worse, so one number per cut is enough for every G: O(n^2) per T.
- ``least_sum`` (any cluster, and every flush): the least sum of tau for atoms i.. on exactly d ranks with every
  tau <= T: O(n^2 G R) per T, with R allowed numbers of replicas. Nearly all of these (i, d) cannot be part of a plan,
  because the atoms from i on need more ranks than d, or those before more than the others.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autopipe.planning.search import solver
from autopipe.planning.search.solver import Array, Rules


def least_ranks(tables: Any, place: Array, rules: Rules, T: float, g: Array) -> int:
    """Set g[i] to the fewest ranks for atoms i.. with every tau <= T; return g[0].

    The closed form gives lower bounds for all stages. Only stages whose bound is lower than the best count are
    evaluated exactly, in the order of their bounds.
    """
    n, G, cap = len(g) - 1, int(rules[solver.RANKS]), int(rules[solver.MOST])
    budget = T * place.item(solver.SPEED, 0, 0) * min(G, cap) * (1 + 1e-9)
    g[n] = 0
    bounds = _least_counts(tables[solver.TIME], tables[solver.RING] / rules[solver.MICROBATCHES], T)
    for i in range(n - 1, -1, -1):
        # seconds are not additive, because of input-only nodes, but they never decrease as j grows
        stop = int(tables[solver.COMPUTE][i, i + 1 :].searchsorted(budget, side="right"))
        behind = g[i + 1 : i + 1 + stop]
        counts = bounds[i, i + 1 : i + 1 + stop] + behind
        best = G + 1
        while stop:
            k = int(counts.argmin())
            if counts[k] >= best:
                break
            d, counts[k] = int(behind[k]), math.inf
            most = min(best - 1 - d, cap)
            r = solver.least_replicas(tables, place, rules, i, i + 1 + k, d, most, T)
            best = d + r if r <= most else best
        g[i] = best
    return int(g[0])


def _least_counts(t: Array, k: Array, T: float) -> Array:
    """Return lower bounds of the replicas of stages with these t and k: the closed form of ``solver``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        counts = np.where(k < T, np.ceil((t - k) / (T - k) - 1e-9), math.inf)
    return np.where(t <= T, 1.0, np.maximum(counts, 1.0))


def least_sum(
    tables: Any, place: Array, rules: Rules, replica_choices: Array, T: float, top_speed: float,
    h: Array, choice: Array,
) -> None:  # fmt: skip
    """Set h[i, d] to the least sum of tau of atoms i.. on exactly d ranks with every tau <= T; choice[i, d] to (j, r).

    Both are indexed by d in units, of which all ``replica_choices`` are multiples. Only (i, d) that can be part of a
    plan are computed. Of equally good stages, the one with the fewest replicas that ends first is chosen.
    """
    n, G, unit = h.shape[0] - 1, int(rules[solver.RANKS]), int(rules[solver.UNIT])
    seconds, most_seconds = tables[solver.COMPUTE], T * top_speed
    h[:] = math.inf
    h[n, 0] = 0.0
    needed = np.maximum(np.ceil(seconds[:, n] / most_seconds - 1e-9), 1)  # ranks, for the atoms from i on
    before = np.ceil(seconds[0] / most_seconds - 1e-9)
    before[1:] = np.maximum(before[1:], 1)
    before[0] = 0
    after = np.arange(n + 1)
    # by number of ranks behind a cut: the cuts that can have it; no others have a finite sum
    spans = [(n, n + 1)]
    for here in range(1, G // unit + 1):
        d = here * unit
        (cuts,) = np.nonzero((needed[:n] <= d) & (d <= G - before[:n]))
        if not len(cuts):
            spans.append((0, 0))
            continue
        first, last = int(cuts[0]), int(cuts[-1]) + 1
        best, ends = h[first:last, here], choice[first:last, here]
        for r in replica_choices.tolist():
            if r > d:
                break
            start, stop = spans[here - r // unit]
            # the stages that r ranks can compute in time: from ``top`` on, and up to ``stop``
            longest = most_seconds * r * (1 + 1e-9)
            start = max(start, first + 1)
            bottom = min(last, stop - 1)
            if start >= stop or first >= bottom:
                continue
            top = first + int(np.count_nonzero(seconds[first:bottom, start] > longest))
            stop = start + int(np.count_nonzero(seconds[bottom - 1, start:stop] <= longest))
            if top >= bottom or start >= stop:
                continue
            tau = solver.stages(tables, place, rules, slice(top, bottom), slice(start, stop), r, d - r)
            sums = np.where(tau <= T, tau + h[start:stop, here - r // unit], math.inf)
            sums[after[start:stop] <= after[top:bottom, None]] = math.inf
            j = sums.argmin(axis=1)
            least = sums[after[: bottom - top], j]
            (lower,) = np.nonzero(least < best[top - first : bottom - first])
            best[lower + top - first] = least[lower]
            ends[lower + top - first, 0], ends[lower + top - first, 1] = j[lower] + start, r
        (finite,) = np.nonzero(best < math.inf)
        spans.append((first + int(finite[0]), first + int(finite[-1]) + 1) if len(finite) else (0, 0))
