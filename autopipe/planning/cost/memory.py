"""The memory of a stage on each of its ranks: the formula, microbatches in flight and weight versions.

With v weight versions and at most k microbatches in flight::

    state        = v W + G + O             W weights, their casts and buffers, G gradients, O optimizer state
    peak         = state + k (A + K) + X   A saved for backward; K batch tensors, received values, input-only results
    with recompute
    peak         = state + k K + A + X     only the inputs of the stage are kept; one microbatch's A exists at a time
    with recompute by block
    peak         = state + k (C + K) + U   C what crosses between units is kept; the largest unit's U (``block_sums``)
    if the backward is split, on stage s > 0
    peak         = the same + (s + 1) H    H gradients between the halves: as large as the results of trained nodes
    X            = max(0, max_x (w_x - A behind x))   w workspace of a node; what is behind it is freed by then

If r replicas of a stage divide its optimizer state by whole parameters, none of them has more of it than
O' = min(O, O / r + the state of the largest parameter), which takes the place of O.

G counts trained parameters only, O only those that the stage itself steps. A profile counts a tensor at the first node
that keeps it. A stage that receives the tensor counts it in K and not in A. A stage that sends it counts it in A in any
case, because its backward starts from it.
"""

from __future__ import annotations

import math
from typing import TypeVar

from autopipe.planning.cost.pair_sum import Array
from autopipe.schedules.kind import ScheduleKind

Amount = TypeVar("Amount", int, float, Array)


def stage_peak(
    weights: Amount,
    versions: int,
    fixed: Amount,
    kept: Amount,
    in_flight: int,
    saved: Amount,
    saved_in_flight: int,
) -> Amount:
    """Return the peak bytes of a stage. The search, its compiled loops and a plan when it is built use this formula.

    ``peaks.with_peaks`` replaces the bytes of the chosen plan by the count along its schedule (``schedules.memory``).

    ``fixed``: G + O + X, and the waiting halves of backwards. ``saved_in_flight``: how many microbatches keep their A:
    1 if the whole stage is recomputed. By block, C takes the place of A, and U that of X. Bytes are whole numbers, so
    the order in which float64 adds them does not matter below 2**53.
    """
    return versions * weights + fixed + in_flight * kept + saved_in_flight * saved


def even_share(optimizer: Amount, largest: Amount, replicas: int) -> Amount:
    """Return O / r + the state of the largest parameter, in whole bytes: O' if it is less than O.

    The parameters go to the replicas one after the other, the largest first, each to the replica with the least state
    (``runtime.step.sharding``). The last one that a replica gets makes it exceed the mean by at most its own state.
    Source: R. L. Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17 (1969).
    """
    return -(-optimizer // replicas) + largest


def in_flight(kind: ScheduleKind, num_microbatches: int, *, behind: int, num_ranks: int, replicas: int = 1) -> int:
    """Return the most microbatches in flight on a rank of a stage. ``behind``: the number of ranks of later stages."""
    share = math.ceil(num_microbatches / replicas)
    if kind.in_flight == "all":
        return share
    if kind.in_flight == "ranks":
        return min(share, math.ceil(num_ranks / replicas))
    depth = math.ceil(kind.depth * behind / replicas) + 1
    return min(depth, share) if kind.synchronous else depth


def in_flight_of_interleaved(stages_per_rank: int, num_ranks: int, num_microbatches: int, stage: int) -> int:
    """Return the most microbatches in flight of an interleaved stage; stage s is on rank ``s mod num_ranks``.

    A rank runs rounds of c microbatches through each of its v stages, and 2(p-1-r) + (v-1)c forwards before its first
    backward (arXiv:2104.04473, section 2.2). After that, a backward follows each forward. The number of a stage is
    largest before its first backward, which follows c backwards of each later stage of the rank.
    """
    v, (chunk, rank) = stages_per_rank, divmod(stage, num_ranks)
    c = num_microbatches // max(num_microbatches // num_ranks, 1)
    done = (v - 1) * c + 2 * (num_ranks - 1 - rank) + 1 + (v - 1 - chunk) * c
    rounds, rest = divmod(done, v * c)
    return min(num_microbatches, rounds * c + min(max(rest - chunk * c, 0), c))


def weight_versions(kind: ScheduleKind, num_microbatches: int, num_in_flight: int, replicas: int = 1) -> int:
    """Return the number of weight versions that a stage keeps, with ``num_in_flight`` microbatches on each rank."""
    fixed = kind.fixed_versions(num_microbatches)
    if fixed is not None:
        return fixed
    return 1 + math.ceil((num_in_flight - 1) * replicas / num_microbatches)
