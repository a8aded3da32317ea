"""What a stage keeps on each of its ranks, in symbols and in bytes.

With v weight versions and at most k microbatches in flight::

    state        = v W + G + O             W weights and buffers, G gradients, O optimizer state
    peak         = state + k (A + K) + X   A saved for backward, K batch tensors, received values, input-only results
    with recompute
    peak         = state + k K + A + X     only the inputs of the stage are kept; one microbatch's A lives at a time
    where the backward is split, on stage s > 0
    peak         = the same + (s + 1) H    H the gradients between the halves: as large as what has weights to train
    X            = max(0, max_x (w_x - A behind x))   w workspace of a node; what is behind it is freed by then

G counts trained parameters only, O only those that the stage itself steps. A profile counts a tensor at the first node
that keeps it. A stage that has the tensor from elsewhere counts it in K and not in A; one that sends it counts it in A
in any case, as its backward starts from it.
"""

from __future__ import annotations

import math

from autopipe.planning.cost.tables import Array, Tables
from autopipe.schedules.kind import ScheduleKind

GIB = 2**30
_UNITS = (GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")


def _unit(num_bytes: float) -> tuple[int, str]:
    return next((unit for unit in _UNITS if num_bytes >= unit[0]), _UNITS[-1])


def gib(num_bytes: float, digits: int = 3) -> str:
    """Return human-readable bytes in GiB, MiB or KiB, to ``digits`` significant digits."""
    if num_bytes >= 1000 * GIB:
        return f"{num_bytes / GIB:,.0f} GiB"
    size, unit = _unit(num_bytes)
    return f"{num_bytes / size:.{digits}g} {unit}"


def at_least(num_bytes: float) -> str:
    """Return human-readable bytes, rounded up, so that the amount suffices."""
    size, _ = _unit(num_bytes)
    value = num_bytes / size
    step = 10.0 ** (math.floor(math.log10(value)) - 2) if value > 0 else 1.0
    return gib(math.ceil(value / step - 1e-9) * step * size)


def apart(needed: float, available: float) -> tuple[str, str]:
    """Return two human-readable sizes, with enough digits to differ."""
    for digits in range(3, 16):
        texts = gib(needed, digits), gib(available, digits)
        if texts[0] != texts[1]:
            break
    return texts


def in_flight(kind: ScheduleKind, num_microbatches: int, *, behind: int, num_ranks: int, replicas: int = 1) -> int:
    """Return how many microbatches a rank of a stage holds at most. ``behind``: the ranks of all later stages."""
    share = math.ceil(num_microbatches / replicas)
    if kind.in_flight == "all":
        return share
    if kind.in_flight == "ranks":
        return min(share, math.ceil(num_ranks / replicas))
    depth = math.ceil(kind.depth * behind / replicas) + 1
    return min(depth, share) if kind.synchronous else depth


def in_flight_of_interleaved(stages_per_rank: int, num_ranks: int, num_microbatches: int, stage: int) -> int:
    """Return how many microbatches an interleaved stage holds at most; stage s is on rank ``s mod num_ranks``.

    A rank takes c microbatches at a time through each of its v stages, and sends 2(p-1-r) + (v-1)c forwards ahead
    (arXiv:2104.04473, section 2.2); in steady state each further forward is followed by a backward. A stage holds most
    when its first backward is about to run, behind c of each later stage of its rank.
    """
    v, (chunk, rank) = stages_per_rank, divmod(stage, num_ranks)
    c = num_microbatches // max(num_microbatches // num_ranks, 1)
    done = (v - 1) * c + 2 * (num_ranks - 1 - rank) + 1 + (v - 1 - chunk) * c
    rounds, rest = divmod(done, v * c)
    return min(num_microbatches, rounds * c + min(max(rest - chunk * c, 0), c))


def weight_versions(kind: ScheduleKind, num_microbatches: int, num_in_flight: int, replicas: int = 1) -> int:
    """Return how many versions of its weights a stage keeps, with ``num_in_flight`` microbatches on each rank."""
    fixed = kind.fixed_versions(num_microbatches)
    if fixed is not None:
        return fixed
    return 1 + math.ceil((num_in_flight - 1) * replicas / num_microbatches)


def peak_tables(
    tables: Tables, optimizer_bytes_per_byte: float, num_in_flight: int, versions: int, waiting: int = 0
) -> tuple[Array, Array]:
    """Return the peak bytes of every stage (i, j) without and with recompute. ``waiting``: halves of a backward."""
    state = versions * tables.weight_bytes + tables.gradient_bytes + optimizer_bytes_per_byte * tables.stepped_bytes
    kept = state + num_in_flight * tables.kept_bytes + tables.workspace_bytes + waiting * tables.between_bytes
    return kept + num_in_flight * tables.saved_bytes, kept + tables.saved_bytes
