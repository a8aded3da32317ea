"""Interleaved 1F1B: v stages on each rank, so that the pipeline fills v times as fast.

Below, two ranks have four stages: rank 0 has stages 0 and 2, rank 1 has 1 and 3. ``2F0`` is the forward of microbatch 0
at stage 2.

::

    rank 0 | 0F0  0F1  2F0  2F1  0F2  2B0  0F3  2B1  2F2  0B0  2F3  0B1       2B2       2B3  0B2  0B3+
    rank 1 |      1F0  1F1  3F0  3B0  3F1  3B1  1F2  1B0  1F3  1B1  3F2  3B2  3F3  3B3  1B2  1B3+

Bubble: the time of ``(p - 1) / v`` microbatches on p ranks (if m is a multiple of p). This is 1/v of 1F1B's bubble, for
v times the transfers. Memory: ``1 + (p - 1) / (p v)`` times as much in flight as 1F1B.

With d replicas of every stage, d such pipelines run side by side, each on its share of the microbatches (PTD-P without
tensor parallelism).

Source: Megatron-LM, arXiv:2104.04473, sections 2.2 and 3.
"""

from __future__ import annotations

import functools

from autopipe.ir.schedule import Op, Schedule, ScheduleSpec
from autopipe.schedules.kind import ScheduleKind
from autopipe.schedules.looped import STAGES_PER_RANK, Loop
from autopipe.schedules.rows import alternate, flushed


def interleaved(request: ScheduleSpec) -> Schedule:
    """Return the schedule. Raises: ScheduleError if the layout is not looped, or m gives unequal rounds."""
    loop = Loop.of(KIND.name, request)

    def order(rank: int, minibatch: int) -> list[tuple[Op, int, int]]:
        forwards = loop.forwards(rank, minibatch)
        warmup = loop.warmup(loop.place_of(rank), 2, len(forwards) // loop.stages_per_rank)
        units = alternate(forwards, warmup, loop.backwards(rank, minibatch))
        return [(op, stage, j) for op, (stage, j) in units]

    return flushed(KIND.name, request, order, loop.in_flight(2, 0))


KIND = ScheduleKind(
    name="interleaved",
    make=interleaved,
    description="several stages on each rank: a smaller bubble for more transfers; exact",
    source="Megatron-LM, arXiv:2104.04473, section 2.2",
    synchronous=True,
    tried_by_auto=True,
    planned_stages_per_rank=(2, 3, 4),
    example=ScheduleSpec(((0,), (1,), (0,), (1,)), 4),
    options=(STAGES_PER_RANK,),
    check=functools.partial(Loop.of, "interleaved"),
    several_stages=True,
    equal_replicas=True,
)
