"""The probes of a bottleneck for stages with replicas, as loops.

They are the recursions written out: one stage after the other, in plain loops over numbers. The planner computes the
same values in array operations, and must return the same plans.
"""

from __future__ import annotations

import math
from typing import Any

from autopipe.planning.cost.memory import even_share, stage_peak
from autopipe.planning.search import solver

Array = Any


def in_flight_and_versions(rules: Array, r: int, d: int) -> tuple[float, float]:
    """Return (microbatches in flight on a rank, weight versions). With VERSIONS 0, versions depend on the former."""
    m, width = rules[solver.MICROBATCHES], rules[solver.WIDTH]
    share = math.ceil(m / (r * width))
    in_flight = math.ceil(rules[solver.DEPTH] * d / r) + 1
    if rules[solver.ALL] == 1:
        in_flight = share
    elif rules[solver.ALL] == 2:
        in_flight = min(math.ceil(rules[solver.RANKS] / r), share)
    elif rules[solver.FLUSH] > 0:
        in_flight = min(in_flight, share)
    versions = rules[solver.VERSIONS]
    if versions == 0:
        versions = 1 + math.ceil((in_flight - 1) * r * width / m)
    return in_flight, versions


def stage(tables: Any, place: Array, rules: Array, i: int, j: int, r: int, d: int) -> tuple[float, int]:
    """Return (tau, index of the mode) of a stage, or (inf, 0) if it does not fit."""
    a, q = 0, 0
    if rules[solver.EQUAL] == 0:
        unit = int(rules[solver.UNIT])
        a, q = (int(rules[solver.RANKS]) - d - r) // unit, r // unit
    m = rules[solver.MICROBATCHES]
    in_flight, versions = in_flight_and_versions(rules, r, d)
    if rules[solver.FLUSH] == 0 and (in_flight - 1) * r * rules[solver.WIDTH] > (versions - 1) * m:
        return math.inf, 0
    weights, fixed, kept, saved = (
        tables[solver.WEIGHTS][i, j],
        tables[solver.STATE][i, j],
        tables[solver.KEPT][i, j],
        tables[solver.SAVED][i, j],
    )
    block_fixed = tables[solver.BLOCK_STATE][i, j]
    if rules[solver.SHARE] > 0:
        optimizer = tables[solver.OPTIMIZER][i, j]
        freed = max(optimizer - even_share(optimizer, tables[solver.LARGEST][i, j], r * int(rules[solver.WIDTH])), 0.0)
        fixed, block_fixed = fixed - freed, block_fixed - freed
    memory = place[solver.MEMORY, a, q]
    seconds, mode = tables[solver.COMPUTE][i, j], solver.NEVER
    if rules[solver.MAY_KEEP] > 0 and stage_peak(weights, versions, fixed, kept, in_flight, saved, in_flight) <= memory:
        mode = solver.NEVER
    elif (
        rules[solver.MAY_BLOCK] > 0
        and stage_peak(weights, versions, block_fixed, kept, in_flight, tables[solver.CROSSING][i, j], in_flight)
        <= memory
    ):
        mode = solver.BLOCK
        seconds += tables[solver.AGAIN][i, j]
        if in_flight == 1:
            seconds -= tables[solver.LAST][i, j]
    elif (
        rules[solver.MAY_RECOMPUTE] > 0 and stage_peak(weights, versions, fixed, kept, in_flight, saved, 1.0) <= memory
    ):
        mode = solver.STAGE
        seconds += tables[solver.FORWARD][i, j]
    else:
        return math.inf, 0
    speed = place[solver.SPEED, a, q]
    t = seconds / speed
    tied = 0.0
    if i > 0:
        t += tables[solver.RECEIVED][i, j] * place[solver.IN_SECONDS, a, q] + place[solver.IN_LATENCY, a, q]
        tied = tables[solver.TIED][i, j] * place[solver.IN_SECONDS, a, q]
    if d > 0:
        t += tables[solver.SENT][i, j] * place[solver.OUT_SECONDS, a, q] + place[solver.OUT_LATENCY, a, q]
        if i == 0:
            tied = tables[solver.TIED][i, j] * place[solver.OUT_SECONDS, a, q]
    reduce = 0.0
    if r > 1:
        reduce += 2 * (r - 1) / r * tables[solver.GRADIENT][i, j] * place[solver.RING_SECONDS, a, q]
        reduce += 2 * (r - 1) * place[solver.RING_LATENCY, a, q]
    width = rules[solver.WIDTH]
    if width > 1:
        reduce += 2 * (width - 1) / width * tables[solver.GRADIENT][i, j] * rules[solver.OUTER_SECONDS]
        reduce += 2 * (width - 1) * rules[solver.OUTER_LATENCY]
    if rules[solver.SHARE] > 0:
        reduce *= 2  # the new weights are exchanged like the gradients
    share = 2 * tied + reduce
    return t / (r * width) + share / m, mode


def least_ranks(tables: Any, place: Array, rules: Array, T: float, g: Array) -> int:
    """Set g[i] to the fewest ranks for atoms i.. with every tau <= T; return g[0]."""
    n, G, cap = len(g) - 1, int(rules[solver.RANKS]), int(rules[solver.MOST])
    g[n] = 0
    for i in range(n - 1, -1, -1):
        g[i] = G + 1
        for j in range(i + 1, n + 1):
            for r in range(1, min(int(g[i] - 1 - g[j]), cap) + 1):
                tau, _ = stage(tables, place, rules, i, j, r, int(g[j]))
                if tau <= T and tau < math.inf:
                    g[i] = g[j] + r
                    break
    return int(g[0])


def least_sum(
    tables: Any, place: Array, rules: Array, replica_choices: Array, T: float, top_speed: float,
    h: Array, choice: Array,
) -> None:  # fmt: skip
    """Set h[i, d] to the least sum of tau of atoms i.. on exactly d ranks with every tau <= T; choice[i, d] to (j, r).

    Both are indexed by d in units, of which all ``replica_choices`` are multiples. Only (i, d) that can be part of a
    plan are computed: d ranks must suffice for the atoms from i on within T, and the other ranks for those before. If
    devices and links are equal, only the memory depends on d.
    """
    n, G, unit = h.shape[0] - 1, int(rules[solver.RANKS]), int(rules[solver.UNIT])
    seconds = tables[solver.COMPUTE]
    h[:] = math.inf
    h[n, 0] = 0.0
    for i in range(n - 1, -1, -1):
        before = math.ceil(seconds[0, i] / (T * top_speed) - 1e-9) if i > 0 else 0
        most = G - max(before, 1 if i > 0 else 0)
        for r in replica_choices:
            for j in range(i + 1, n + 1):
                if seconds[i, j] > T * top_speed * r * (1 + 1e-9):
                    break
                first = 0 if j == n else max(1, math.ceil(seconds[j, n] / (T * top_speed) - 1e-9))
                last = 0 if j == n else min(most - r, (n - j) * int(rules[solver.MOST]))
                tau, last_in_flight, size = math.inf, -1.0, r // unit
                for behind in range(-(-first // unit), min(last, most - r) // unit + 1):
                    d, here = behind * unit, behind + size
                    if h[j, behind] >= h[i, here]:
                        continue
                    if rules[solver.EQUAL] > 0:
                        now, _ = in_flight_and_versions(rules, r, d)
                        if now != last_in_flight or rules[solver.VERSIONS] == 0:
                            tau, _ = stage(tables, place, rules, i, j, r, d)
                            last_in_flight = now
                    else:
                        tau, _ = stage(tables, place, rules, i, j, r, d)
                    if tau <= T and tau + h[j, behind] < h[i, here]:
                        h[i, here] = tau + h[j, behind]
                        choice[i, here, 0], choice[i, here, 1] = j, r
