"""Eager 1F1B: 1F1B with a deeper warm-up, so that transfers overlap with computation.

With ``p - s`` microbatches in flight, stage s waits for every transfer on the way to the last stage and back. ``depth``
times as many microbatches in flight hide these transfers, but take more memory. The result is the same. Below, depth is
2.

::

    rank 0 | F0  F1  F2  F3  F4  B0  F5  B1      B2      B3      B4      B5+
    rank 1 |     F0  F1  F2  B0  F3  B1  F4  B2  F5  B3      B4      B5+
    rank 2 |         F0  B0  F1  B1  F2  B2  F3  B3  F4  B4  F5  B5+

Bubble: ``(p - 1) / (m + p - 1)`` if transfers cost nothing. Memory: ``depth * (p - 1 - s) + 1`` in flight at stage s.

Source: Eager-1F1B, arXiv:2211.05322 (depth 2).
"""

from __future__ import annotations

from autopipe.ir.schedule import Schedule, ScheduleSpec
from autopipe.schedules.kind import DEPTH, ScheduleKind, line
from autopipe.schedules.one_f_one_b import with_depth


def eager_1f1b(request: ScheduleSpec) -> Schedule:
    """Return the schedule. Raises: ScheduleError if a rank has two stages."""
    return with_depth(KIND.name, request, request.options.get("depth", 2))


KIND = ScheduleKind(
    name="eager-1f1b",
    make=eager_1f1b,
    description="1f1b with more microbatches in flight, which hides transfers; exact",
    source="Eager-1F1B, arXiv:2211.05322",
    synchronous=True,
    tried_by_auto=True,
    example=line(3, 6),
    options=(DEPTH.with_default(2),),
)
