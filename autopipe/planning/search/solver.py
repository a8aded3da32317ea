"""The arithmetic of the search with replicas, memory and recompute.

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

Source: the planner of PipeDream (SOSP 2019) for the problem; the parametric form and the closed form of r are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autopipe.ir.plan import RECOMPUTE_MODES
from autopipe.planning.cost.memory import even_share, stage_peak

Array = Any
Amount = Any  # a number, or an array of them
Rules = Sequence[float]

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


def in_flight_and_versions(rules: Rules, r: int, d: int) -> tuple[float, float]:
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


def stage(tables: Any, place: Array, rules: Rules, i: int, j: int, r: int, d: int) -> tuple[float, int]:
    """Return (tau, index of the mode) of a stage, or (inf, 0) if it does not fit."""
    tau, mode = _stage(lambda table: tables[table].item(i, j), i > 0, _places(place, rules, r, d), rules, r, d, _choose)
    return tau, mode


def stages(tables: Any, place: Array, rules: Rules, rows: slice, columns: slice, r: int, d: int) -> Array:
    """Return tau of the stages that begin at the atoms ``rows`` and end at ``columns``; infinity if they do not fit."""
    later: Any = True if rows.start else np.arange(rows.start, rows.stop)[:, None] > 0
    where, at = _choose if rows.start else np.where, _places(place, rules, r, d)
    tau, _ = _stage(lambda table: tables[table][rows, columns], later, at, rules, r, d, np.where, where)
    return np.broadcast_to(tau, (rows.stop - rows.start, columns.stop - columns.start))


def _choose(condition: bool, one: Any, other: Any) -> Any:
    return one if condition else other


def _places(place: Array, rules: Rules, r: int, d: int) -> list[float]:
    unit, a, q = int(rules[UNIT]), 0, 0
    if rules[EQUAL] == 0:
        a, q = (int(rules[RANKS]) - d - r) // unit, r // unit
    values: list[float] = place[:, a, q].tolist()
    return values


def _stage(
    entry: Callable[[int], Amount], later: Any, place: list[float], rules: Rules, r: int, d: int,
    where: Callable[..., Any], where_first: Callable[..., Any] | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Return (tau, mode) of one stage, or of an array of them. All engines use this definition.

    ``entry``: of a table. ``later``: whether it is not the first stage. ``where``: chooses by a condition, which is an
    array if the entries are; ``where_first``: the same if the condition is ``later``.
    """
    where_first = where_first or where
    m, width, memory = rules[MICROBATCHES], rules[WIDTH], place[MEMORY]
    in_flight, versions = in_flight_and_versions(rules, r, d)
    if rules[FLUSH] == 0 and (in_flight - 1) * r * width > (versions - 1) * m:
        return math.inf, NEVER
    seconds, mode = entry(COMPUTE), NEVER
    if memory < math.inf or rules[MAY_KEEP] == 0:
        seconds, mode = _fitting(entry, seconds, memory, rules, r, in_flight, versions, where)
    sent = d > 0
    t = seconds / place[SPEED]
    if later is not False:
        t = t + where_first(later, entry(RECEIVED) * place[IN_SECONDS] + place[IN_LATENCY], 0.0)
    if sent:
        t = t + (entry(SENT) * place[OUT_SECONDS] + place[OUT_LATENCY])
    tied = entry(TIED) * where_first(later, place[IN_SECONDS], place[OUT_SECONDS] if sent else 0.0)
    reduce = 0.0
    if r > 1:
        reduce = 2 * (r - 1) / r * entry(GRADIENT) * place[RING_SECONDS]
        reduce = reduce + 2 * (r - 1) * place[RING_LATENCY]
    if width > 1:
        reduce = reduce + 2 * (width - 1) / width * entry(GRADIENT) * rules[OUTER_SECONDS]
        reduce = reduce + 2 * (width - 1) * rules[OUTER_LATENCY]
    if rules[SHARE] > 0:
        reduce = reduce * 2  # the new weights are exchanged like the gradients
    return t / (r * width) + (2 * tied + reduce) / m, mode


def _fitting(
    entry: Callable[[int], Amount], compute: Amount, memory: float, rules: Rules, r: int, in_flight: Any,
    versions: Any, where: Callable[..., Any],
) -> tuple[Any, Any]:  # fmt: skip
    """Return (seconds with what runs again, mode) with the first mode that fits the memory, infinity if none does."""
    weights, fixed, kept, saved = entry(WEIGHTS), entry(STATE), entry(KEPT), entry(SAVED)
    freed: Any = 0.0
    if rules[SHARE] > 0:
        optimizer = entry(OPTIMIZER)
        freed = optimizer - even_share(optimizer, entry(LARGEST), r * int(rules[WIDTH]))
        freed = where(freed > 0, freed, 0.0)
    seconds, mode = math.inf, NEVER
    if rules[MAY_RECOMPUTE] > 0:
        fits = stage_peak(weights, versions, fixed - freed, kept, in_flight, saved, 1) <= memory
        seconds, mode = where(fits, compute + entry(FORWARD), seconds), where(fits, STAGE, mode)
    if rules[MAY_BLOCK] > 0:
        crossing = entry(CROSSING)
        fits = stage_peak(weights, versions, entry(BLOCK_STATE) - freed, kept, in_flight, crossing, in_flight) <= memory
        again = compute + entry(AGAIN)
        if in_flight == 1:
            again = again - entry(LAST)
        seconds, mode = where(fits, again, seconds), where(fits, BLOCK, mode)
    if rules[MAY_KEEP] > 0:
        fits = stage_peak(weights, versions, fixed - freed, kept, in_flight, saved, in_flight) <= memory
        seconds, mode = where(fits, compute, seconds), where(fits, NEVER, mode)
    return seconds, mode


def replicas_for_time(t: float, k: float, T: float) -> float:
    """Return a lower bound of r, the number of replicas of a stage, by time. Infinity: no number suffices.

    t/r + k (1 - 1/r) <= T needs r >= (t - k)/(T - k).
    """
    if t <= T:
        return 1.0
    if k >= T:
        return math.inf
    return math.ceil((t - k) / (T - k) - 1e-9)


def replicas_for_memory(rules: Rules, d: int, free: float, each: float) -> float:
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


def least_count(
    rules: Rules, d: int, most: int, T: float, memory: float,
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


def least_replicas(tables: Any, place: Array, rules: Rules, i: int, j: int, d: int, most: int, T: float) -> int:
    """Return the fewest replicas, at most ``most``, with which a stage takes tau <= T; ``most`` + 1 if none suffices.

    All devices and links must be equal.
    """
    speed, memory, ring_latency = (place.item(row, 0, 0) for row in (SPEED, MEMORY, RING_LATENCY))

    def entry(table: int) -> float:
        value: float = tables[table].item(i, j)
        return value

    t, k = entry(TIME), entry(RING) / rules[MICROBATCHES]
    least = least_count(
        rules, d, most, T, memory,
        t, k, entry(FORWARD) / speed, entry(WEIGHTS), entry(LEAST), entry(KEPT), entry(SAVED),
        (entry(AGAIN) - entry(LAST)) / speed, entry(LEAST_BLOCK), entry(CROSSING),
    )  # fmt: skip
    if least > most:
        return most + 1
    r = int(least)
    slope = (2 + 2 * rules[SHARE]) * ring_latency / rules[MICROBATCHES]
    while r <= most:
        tau, mode = stage(tables, place, rules, i, j, r, d)
        if tau <= T and tau < math.inf:
            return r
        # too slow although it fits, and more replicas are slower still: one more gains (t - k)/r^2 and costs slope
        if tau < math.inf and mode == NEVER and t - k <= slope * r * r:
            return most + 1
        r += 1
    return most + 1
