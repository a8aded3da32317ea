"""The loops of the search with replicas, memory and recompute, compiled if numba is installed.

A stage is atoms i..j-1 on r ranks with d ranks behind it: the r ranks from a = G - d - r on. Its time per microbatch,
and its share of the period::

    t   = (F + B) / s + R / b_in + 2 l_in + S / b_out + 2 l_out          + R / s

R is what runs again: 0, the forward of the units with recompute by block, or F with recompute of the stage.
    tau = t / r + (2 (r-1)/r g / b_ring + 2 (r-1) l_ring + 2 tied / b) / m

    n <= ceil(depth d / r) + 1, and in a flush n <= ceil(m/r)            microbatches in flight; all: n = ceil(m/r)
    (n - 1) r <= (v - 1) m without a flush                               the limit of v weight versions

Nested placement assigns the same pipeline to each of w groups of ranks. A stage then has r w replicas, and the groups
all-reduce over the outer links, which adds 2 (w-1)/w g / b_outer + 2 (w-1) l_outer to the share of m.

Memory (``cost.memory.stage_peak``), in whole bytes::

    v W + g' + n (A + K) <= memory, or else, by block, v W + g'' + n (C + K) <= memory (``cost.block_sums``),
    or else, with recompute of the stage, v W + g' + n K + A <= memory

If the replicas divide the optimizer state, g' and g'' fall as r grows (``cost.memory.even_share``). Bounds of r by
memory then use g' and g'' without any optimizer state (LEAST, LEAST_BLOCK), and ``stage`` decides.

Two engines probe a bottleneck T; ``bottleneck`` chooses T:

- ``least_ranks`` (equal devices and links): the fewest ranks for atoms i.. with every tau <= T. Fewer ranks behind a
  stage are never worse, so one number per cut is enough for every G: O(n^2) per T.
- ``least_sum`` (any cluster, and every flush): the least sum of tau for atoms i.. on exactly d ranks with every
  tau <= T: O(n^2 G R) per T, with R allowed numbers of replicas.

Source: the planner of PipeDream (SOSP 2019) for the problem; the parametric form and the closed form of r are ours.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autopipe.ir.plan import RECOMPUTE_MODES
from autopipe.planning.cost.memory import even_share, stage_peak
from autopipe.planning.search.compiled import compiled

Array = Any  # numba infers the types of arrays in compiled code

# indices in the tuple of tables; TIME and RING: t and k m of one replica, for equal devices and links only
COMPUTE, FORWARD, RECEIVED, SENT, GRADIENT, TIED, WEIGHTS, STATE, SAVED, KEPT, TIME, RING = range(12)
# the same with recompute by block: g'', C, the seconds of the units, and of the last one if it need not run again
BLOCK_STATE, CROSSING, AGAIN, LAST = range(12, 16)
# optimizer state of all parameters and of the largest; the least g' and g'' that any number of replicas can have
OPTIMIZER, LARGEST, LEAST, LEAST_BLOCK = range(16, 20)
# indices in the placement tables; their entries are by (first rank, replicas) in units, or (0, 0) if ranks are equal
SPEED, MEMORY, IN_SECONDS, IN_LATENCY, OUT_SECONDS, OUT_LATENCY, RING_SECONDS, RING_LATENCY = range(8)
# indices in the vector of rules; MOST: the most replicas; UNIT: numbers of replicas are multiples of it
MICROBATCHES, RANKS, DEPTH, ALL, FLUSH, VERSIONS, MAY_KEEP, MAY_RECOMPUTE, EQUAL = range(9)
WIDTH, OUTER_SECONDS, OUTER_LATENCY, MOST, UNIT, MAY_BLOCK, SHARE = range(9, 16)
NUM_RULES = 16
MODES = RECOMPUTE_MODES
NEVER, BLOCK, STAGE = range(3)


peak_bytes: Any = compiled(stage_peak)
optimizer_share: Any = compiled(even_share)


@compiled
def in_flight_and_versions(rules: Array, r: int, d: int) -> tuple[float, float]:
    """Return (microbatches in flight on a rank, weight versions). With VERSIONS 0, versions depend on the former."""
    m, width = rules[MICROBATCHES], rules[WIDTH]
    share = math.ceil(m / (r * width))
    in_flight = math.ceil(rules[DEPTH] * d / r) + 1
    if rules[ALL] == 1:
        in_flight = share
    elif rules[ALL] == 2:
        in_flight = min(math.ceil(rules[RANKS] / r), share)
    elif rules[FLUSH] > 0:
        in_flight = min(in_flight, share)
    versions = rules[VERSIONS]
    if versions == 0:
        versions = 1 + math.ceil((in_flight - 1) * r * width / m)
    return in_flight, versions


@compiled
def stage(tables: Any, place: Array, rules: Array, i: int, j: int, r: int, d: int) -> tuple[float, int]:
    """Return (tau, index of the mode) of a stage, or (inf, 0) if it does not fit. All engines use this definition."""
    a, q = 0, 0
    if rules[EQUAL] == 0:
        unit = int(rules[UNIT])
        a, q = (int(rules[RANKS]) - d - r) // unit, r // unit
    m = rules[MICROBATCHES]
    in_flight, versions = in_flight_and_versions(rules, r, d)
    if rules[FLUSH] == 0 and (in_flight - 1) * r * rules[WIDTH] > (versions - 1) * m:
        return math.inf, 0
    weights, fixed, kept, saved = tables[WEIGHTS][i, j], tables[STATE][i, j], tables[KEPT][i, j], tables[SAVED][i, j]
    block_fixed = tables[BLOCK_STATE][i, j]
    if rules[SHARE] > 0:
        optimizer = tables[OPTIMIZER][i, j]
        freed = max(optimizer - optimizer_share(optimizer, tables[LARGEST][i, j], r * int(rules[WIDTH])), 0.0)
        fixed, block_fixed = fixed - freed, block_fixed - freed
    memory = place[MEMORY, a, q]
    seconds, mode = tables[COMPUTE][i, j], NEVER
    if rules[MAY_KEEP] > 0 and peak_bytes(weights, versions, fixed, kept, in_flight, saved, in_flight) <= memory:
        mode = NEVER
    elif (
        rules[MAY_BLOCK] > 0
        and peak_bytes(weights, versions, block_fixed, kept, in_flight, tables[CROSSING][i, j], in_flight) <= memory
    ):
        mode = BLOCK
        seconds += tables[AGAIN][i, j]
        if in_flight == 1:
            seconds -= tables[LAST][i, j]
    elif rules[MAY_RECOMPUTE] > 0 and peak_bytes(weights, versions, fixed, kept, in_flight, saved, 1.0) <= memory:
        mode = STAGE
        seconds += tables[FORWARD][i, j]
    else:
        return math.inf, 0
    speed = place[SPEED, a, q]
    t = seconds / speed
    tied = 0.0
    if i > 0:
        t += tables[RECEIVED][i, j] * place[IN_SECONDS, a, q] + place[IN_LATENCY, a, q]
        tied = tables[TIED][i, j] * place[IN_SECONDS, a, q]
    if d > 0:
        t += tables[SENT][i, j] * place[OUT_SECONDS, a, q] + place[OUT_LATENCY, a, q]
        if i == 0:
            tied = tables[TIED][i, j] * place[OUT_SECONDS, a, q]
    reduce = 0.0
    if r > 1:
        reduce += 2 * (r - 1) / r * tables[GRADIENT][i, j] * place[RING_SECONDS, a, q]
        reduce += 2 * (r - 1) * place[RING_LATENCY, a, q]
    width = rules[WIDTH]
    if width > 1:
        reduce += 2 * (width - 1) / width * tables[GRADIENT][i, j] * rules[OUTER_SECONDS]
        reduce += 2 * (width - 1) * rules[OUTER_LATENCY]
    if rules[SHARE] > 0:
        reduce *= 2  # the new weights are exchanged like the gradients
    share = 2 * tied + reduce
    return t / (r * width) + share / m, mode


@compiled
def replicas_for_time(t: float, k: float, T: float) -> float:
    """Return a lower bound of r, the number of replicas of a stage, by time. Infinity: no number suffices.

    t/r + k (1 - 1/r) <= T needs r >= (t - k)/(T - k).
    """
    if t <= T:
        return 1.0
    if k >= T:
        return math.inf
    return math.ceil((t - k) / (T - k) - 1e-9)


@compiled
def replicas_for_memory(rules: Array, d: int, free: float, each: float) -> float:
    """Return a lower bound of r, the number of replicas of a stage, by memory. Infinity: no number suffices.

    ``each``: the bytes of one microbatch in flight. ``free``: the bytes available for all of them on a rank.
    """
    if free < 0:
        return math.inf
    if each <= 0 or free >= each * 1e9:
        return 1.0
    allowed = math.floor(free / each + 1e-9)
    if allowed < 1:
        return math.inf
    by_share: float = math.ceil(rules[MICROBATCHES] / allowed)
    by_depth: float = math.inf
    if d == 0:
        by_depth = 1.0
    elif allowed > 1:
        by_depth = math.ceil(rules[DEPTH] * d / (allowed - 1))
    if rules[ALL] == 1:
        return by_share
    if rules[ALL] == 2:
        by_ranks: float = math.ceil(rules[RANKS] / allowed)
        return min(by_share, by_ranks)
    return min(by_share, by_depth) if rules[FLUSH] > 0 else by_depth


@compiled
def least_count(
    rules: Array, d: int, most: int, T: float, memory: float,
    t: float, k: float, more: float, weights: float, state: float, kept: float, saved: float,
    block_more: float, block_state: float, crossing: float,
) -> float:  # fmt: skip
    """Return a lower bound of r, the number of replicas of a stage, or infinity if it exceeds ``most``.

    ``more`` and ``block_more``: the seconds of a recompute of the stage and by block. A stage that fits uses one of
    three modes. For each, time and memory give a least r in closed form, and the bound is the least of them. If weight
    versions grow with r, only time gives a bound.
    """
    keep, block, again = math.inf, math.inf, math.inf
    if rules[MAY_KEEP] > 0:
        keep = replicas_for_time(t, k, T)
    if rules[MAY_BLOCK] > 0:
        block = replicas_for_time(t + block_more, k, T)
    if rules[MAY_RECOMPUTE] > 0:
        again = replicas_for_time(t + more, k, T)
    if min(keep, block, again) > most:
        return math.inf
    if rules[VERSIONS] > 0:
        if rules[FLUSH] == 0 and rules[DEPTH] * d > (rules[VERSIONS] - 1) * rules[MICROBATCHES]:
            return math.inf
        free = memory - rules[VERSIONS] * weights - state
        if keep <= most:
            keep = max(keep, replicas_for_memory(rules, d, free, kept + saved))
        if block <= most:
            block = max(block, replicas_for_memory(rules, d, free + state - block_state, kept + crossing))
        if again <= most:
            again = max(again, replicas_for_memory(rules, d, free - saved, kept))
    r = min(keep, block, again)
    return r if r <= most else math.inf


@compiled
def least_replicas(tables: Any, place: Array, rules: Array, i: int, j: int, d: int, most: int, T: float) -> int:
    """Return the fewest replicas, at most ``most``, with which a stage takes tau <= T; ``most`` + 1 if none suffices.

    All devices and links must be equal.
    """
    t, k = tables[TIME][i, j], tables[RING][i, j] / rules[MICROBATCHES]
    more = tables[FORWARD][i, j] / place[SPEED, 0, 0]
    least = least_count(
        rules, d, most, T, place[MEMORY, 0, 0],
        t, k, more, tables[WEIGHTS][i, j], tables[LEAST][i, j], tables[KEPT][i, j], tables[SAVED][i, j],
        (tables[AGAIN][i, j] - tables[LAST][i, j]) / place[SPEED, 0, 0], tables[LEAST_BLOCK][i, j],
        tables[CROSSING][i, j],
    )  # fmt: skip
    if least > most:
        return most + 1
    r = int(least)
    slope = (2 + 2 * rules[SHARE]) * place[RING_LATENCY, 0, 0] / rules[MICROBATCHES]
    while r <= most:
        tau, mode = stage(tables, place, rules, i, j, r, d)
        if tau <= T and tau < math.inf:
            return r
        # too slow although it fits, and more replicas are slower still: one more gains (t - k)/r^2 and costs slope
        if tau < math.inf and mode == NEVER and t - k <= slope * r * r:
            return most + 1
        r += 1
    return most + 1


@compiled
def least_ranks(tables: Any, place: Array, rules: Array, T: float, g: Array) -> int:
    """Set g[i] to the fewest ranks for atoms i.. with every tau <= T; return g[0].

    The closed form gives a lower bound for every end j. The end with the least bound is evaluated exactly first, then
    only those whose bound is still lower than the best count. Nearly all of these do not fit, which ``least_count``
    determines from the entries of one row: passing the tables would take several times as long as the check.
    """
    n, G, cap = len(g) - 1, int(rules[RANKS]), int(rules[MOST])
    memory, speed = place[MEMORY, 0, 0], place[SPEED, 0, 0]
    budget = T * speed * (1 + 1e-9)
    bounds = np.empty(n + 1)
    g[n] = 0
    for i in range(n - 1, -1, -1):
        seconds, time, ring, forward = tables[COMPUTE][i], tables[TIME][i], tables[RING][i], tables[FORWARD][i]
        weights, state, kept, saved = tables[WEIGHTS][i], tables[LEAST][i], tables[KEPT][i], tables[SAVED][i]
        block_state, crossing = tables[LEAST_BLOCK][i], tables[CROSSING][i]
        units, last_unit = tables[AGAIN][i], tables[LAST][i]
        lowest, first, known = G, 0, i
        best = G + 1
        for again in range(2):
            for j in range(i + 1, n + 1):
                d = g[j]
                # seconds are not additive, because of input-only nodes, but they never decrease as j grows
                if seconds[j] > budget * min(cap, lowest if again == 0 else best - 1):
                    break
                if j > known:
                    known, count, t, k = j, 1.0, time[j], ring[j] / rules[MICROBATCHES]
                    if t > T:
                        count = (t - k) / (T - k) - 1e-9 if k < T else math.inf
                    bounds[j] = count + d
                if again == 0:
                    if bounds[j] <= lowest - (first > 0):
                        lowest, first = math.ceil(bounds[j]), j
                elif bounds[j] <= best - 1 and d + 1 < best:
                    most, k = min(best - 1 - d, cap), ring[j] / rules[MICROBATCHES]
                    least = least_count(
                        rules, d, most, T, memory,
                        time[j], k, forward[j] / speed, weights[j], state[j], kept[j], saved[j],
                        (units[j] - last_unit[j]) / speed, block_state[j], crossing[j],
                    )  # fmt: skip
                    if least <= most:
                        r = least_replicas(tables, place, rules, i, j, d, most, T)
                        best = d + r if r <= most else best
            if again == 0 and first > 0:
                d, most = g[first], min(G - g[first], cap)
                r = least_replicas(tables, place, rules, i, first, d, most, T)
                best = d + r if r <= most else best
        g[i] = best
    return int(g[0])


@compiled
def least_sum(
    tables: Any, place: Array, rules: Array, replica_choices: Array, T: float, top_speed: float,
    h: Array, choice: Array,
) -> None:  # fmt: skip
    """Set h[i, d] to the least sum of tau of atoms i.. on exactly d ranks with every tau <= T; choice[i, d] to (j, r).

    Both are indexed by d in units, of which all ``replica_choices`` are multiples. Only (i, d) that can be part of a
    plan are computed: d ranks must suffice for the atoms from i on within T, and the other ranks for those before. If
    devices and links are equal, only the memory depends on d.
    """
    n, G, unit = h.shape[0] - 1, int(rules[RANKS]), int(rules[UNIT])
    seconds = tables[COMPUTE]
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
                last = 0 if j == n else min(most - r, (n - j) * int(rules[MOST]))
                tau, last_in_flight, size = math.inf, -1.0, r // unit
                for behind in range(-(-first // unit), min(last, most - r) // unit + 1):
                    d, here = behind * unit, behind + size
                    if h[j, behind] >= h[i, here]:
                        continue
                    if rules[EQUAL] > 0:
                        now, _ = in_flight_and_versions(rules, r, d)
                        if now != last_in_flight or rules[VERSIONS] == 0:
                            tau, _ = stage(tables, place, rules, i, j, r, d)
                            last_in_flight = now
                    else:
                        tau, _ = stage(tables, place, rules, i, j, r, d)
                    if tau <= T and tau + h[j, behind] < h[i, here]:
                        h[i, here] = tau + h[j, behind]
                        choice[i, here, 0], choice[i, here, 1] = j, r
