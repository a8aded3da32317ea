"""Zero bubble, ZB-H1: the backward is split in two halves, and the half that no other stage waits for fills the bubble.

``I`` computes the gradient for the stage's input, which the previous stage waits for. ``W`` computes the gradient for
its weights, at any later time. Rank k defers its first k weight halves, so that no stage has more microbatches in
flight than 1F1B's first stage.

::

    rank 0 | F0  F1  F2  F3              I0  W0  F4  I1  W1  F5  I2  W2  I3  W3  I4  W4  I5  W5+
    rank 1 |     F0  F1  F2          I0  F3  I1  W0  F4  I2  W1  F5  I3  W2  I4  W3  I5  W4  W5+
    rank 2 |         F0  F1      I0  F2  I1  F3  I2  W0  F4  I3  W1  F5  I4  W2  I5  W3  W4  W5+
    rank 3 |             F0  I0  F1  I1  F2  I2  F3  I3  W0  F4  I4  W1  F5  I5  W2  W3  W4  W5+

Bubble: a third of 1F1B's if F, I and W take the same time. Memory: p microbatches in flight on every rank.

Source: arXiv:2401.10241, section 2.1 (ZB-H1). With several stages on a rank the order is that of
torch.distributed.pipelining's ScheduleInterleavedZeroBubble.
"""

from __future__ import annotations

import functools

from autopipe.ir.schedule import Op, Schedule, ScheduleSpec
from autopipe.schedules.kind import ScheduleKind, line
from autopipe.schedules.looped import STAGES_PER_RANK, Loop
from autopipe.schedules.rows import alternate, flushed


def zero_bubble(request: ScheduleSpec) -> Schedule:
    """Return the schedule. Raises: ScheduleError if the layout is not looped, or m gives unequal rounds."""
    loop = Loop.of(KIND.name, request)

    def order(rank: int, minibatch: int) -> list[tuple[Op, int, int]]:
        place, forwards, backwards = (
            loop.place_of(rank),
            loop.forwards(rank, minibatch),
            loop.backwards(rank, minibatch),
        )
        warmup = loop.warmup(place, 1, len(forwards) // loop.stages_per_rank)
        result: list[tuple[Op, int, int]] = []
        inputs = weights = 0
        for op, (stage, j) in alternate(forwards, warmup, backwards):
            result.append((Op.BACKWARD_INPUTS if op == Op.BACKWARD else Op.FORWARD, stage, j))
            inputs += op == Op.BACKWARD
            if op == Op.BACKWARD and inputs > place:
                result.append((Op.BACKWARD_WEIGHTS, *backwards[weights]))
                weights += 1
        return result + [(Op.BACKWARD_WEIGHTS, *unit) for unit in backwards[weights:]]

    return flushed(KIND.name, request, order, loop.in_flight(1, 1))


KIND = ScheduleKind(
    name="zero-bubble",
    make=zero_bubble,
    description="backward in two halves, one of which fills the bubble; exact",
    source="ZB-H1, arXiv:2401.10241, section 2.1",
    synchronous=True,
    in_flight="ranks",
    example=line(4, 6),
    options=(STAGES_PER_RANK,),
    check=functools.partial(Loop.of, "zero-bubble"),
    several_stages=True,
    equal_replicas=True,
    splits_backward=True,
)
