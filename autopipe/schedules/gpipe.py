"""GPipe: all forwards, then all backwards, then the step.

::

    rank 0 | F0  F1  F2  F3                          B0  B1  B2  B3+
    rank 1 |     F0  F1  F2  F3                  B0  B1  B2  B3+
    rank 2 |         F0  F1  F2  F3          B0  B1  B2  B3+
    rank 3 |             F0  F1  F2  F3  B0  B1  B2  B3+

Bubble: ``(p - 1) / (m + p - 1)``. Memory: all m microbatches in flight.

A rank may have several stages, in any layout: it runs all microbatches through one stage before the next (breadth
first, arXiv:2211.05953).

Source: GPipe, arXiv:1811.06965, section 2.2. Here backwards run in the order 0..m-1, so that gradients add in the order
of a plain accumulation loop.
"""

from __future__ import annotations

from autopipe.ir.schedule import Op, Schedule, ScheduleSpec
from autopipe.schedules.kind import ScheduleKind, check_request, line
from autopipe.schedules.rows import flushed, own_microbatches, stages_of


def gpipe(request: ScheduleSpec, name: str = "gpipe") -> Schedule:
    """Return the schedule. ``name``: of the kind that uses this order.

    Raises: ScheduleError for an invalid request, such as 0 microbatches.
    """
    check_request(name, request)

    def order(rank: int, minibatch: int) -> list[tuple[Op, int, int]]:
        stages = stages_of(request, rank)
        shares = {stage: own_microbatches(request, stage, rank, minibatch) for stage in stages}
        forwards = [(Op.FORWARD, stage, j) for stage in stages for j in shares[stage]]
        return forwards + [(Op.BACKWARD, stage, j) for stage in reversed(stages) for j in shares[stage]]

    in_flight = [-(-request.num_microbatches // len(ranks)) for ranks in request.stage_ranks]
    return flushed(name, request, order, in_flight)


KIND = ScheduleKind(
    name="gpipe",
    make=gpipe,
    description="all forwards, then all backwards; exact; keeps every microbatch in memory",
    source="GPipe, arXiv:1811.06965, section 2.2",
    synchronous=True,
    in_flight="all",
    tried_by_auto=True,
    example=line(4, 4),
    several_stages=True,
)
