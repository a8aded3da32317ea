"""1F1B with a flush (PipeDream-Flush): each backward runs as soon as possible, so fewer microbatches are in flight.

::

    rank 0 | F0  F1  F2  F3              B0  F4  B1  F5  B2      B3      B4      B5+
    rank 1 |     F0  F1  F2          B0  F3  B1  F4  B2  F5  B3      B4      B5+
    rank 2 |         F0  F1      B0  F2  B1  F3  B2  F4  B3  F5  B4      B5+
    rank 3 |             F0  B0  F1  B1  F2  B2  F3  B3  F4  B4  F5  B5+

Bubble: ``(p - 1) / (m + p - 1)``, as GPipe. Memory: ``p - s`` microbatches in flight at stage s.

Source: arXiv:2006.09503, section 3.2; with replicas 1F1B-RR of PipeDream, SOSP 2019.
"""

from __future__ import annotations

from autopipe.ir.schedule import Op, Schedule, ScheduleSpec
from autopipe.schedules.kind import ScheduleKind, check_one_stage_a_rank, line
from autopipe.schedules.rows import alternate, flushed, own_microbatches, stages_of, warmups


def one_f_one_b(request: ScheduleSpec) -> Schedule:
    """Return the schedule. Raises: ScheduleError if a rank has two stages."""
    return with_depth(KIND.name, request, 1)


def with_depth(name: str, request: ScheduleSpec, depth: int) -> Schedule:
    """Return flushed 1F1B with a warm-up ``depth`` times as deep."""
    check_one_stage_a_rank(name, request)
    warmup = warmups(request, depth)

    def order(rank: int, minibatch: int) -> list[tuple[Op, int, int]]:
        (stage,) = stages_of(request, rank)
        share = own_microbatches(request, stage, rank, minibatch)
        return [(op, stage, j) for op, j in alternate(share, warmup[stage])]

    return flushed(name, request, order, [count + 1 for count in warmup])


KIND = ScheduleKind(
    name="1f1b",
    make=one_f_one_b,
    description="forwards and backwards in turn, and a flush after each minibatch; exact",
    source="PipeDream-Flush, arXiv:2006.09503, section 3.2",
    synchronous=True,
    tried_by_auto=True,
    example=line(4, 6),
)
