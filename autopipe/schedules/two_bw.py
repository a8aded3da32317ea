"""PipeDream-2BW: 1F1B without a flush, with the gradients of m microbatches per step and two weight versions.

Minibatch t runs forward and backward on version ``t - 1`` at every stage: ``W(t+1) = W(t) - lr * g(W(t-1); t)``. So
minibatch ``t + 2`` is the first that needs version ``t + 1``.

::

    rank 0 | F0@0    F1@0    F1:0@0                  B0@0    F1:1@0  B1@0+           B1:0@0          B1:1@0+
    rank 1 |         F0@0    F1@0            B0@0    F1:0@0  B1@0+   F1:1@0  B1:0@0          B1:1@0+
    rank 2 |                 F0@0    B0@0    F1@0    B1@0+   F1:0@0  B1:0@0  F1:1@0  B1:1@0+

Bubble: only the first fill and the last drain. Memory: 2 versions; as many in flight as 1F1B. A deeper warm-up hides
transfers (``eager_1f1b``), and changes no result: the minibatch decides the version.

Source: arXiv:2006.09503, section 3.1 (which requires m >= p; m at least the warm-up of stage 0 is enough).
"""

from __future__ import annotations

from autopipe.errors import ScheduleError, counted
from autopipe.ir.schedule import Schedule, ScheduleSpec
from autopipe.schedules.kind import DEPTH, ScheduleKind, check_one_stage_a_rank, line
from autopipe.schedules.rows import unflushed, warmups


def two_bw(request: ScheduleSpec) -> Schedule:
    """Return the schedule. Raises: ScheduleError if a rank has two stages, or m is below the warm-up of stage 0."""
    check_one_stage_a_rank(KIND.name, request)
    warmup = warmups(request, request.options.get("depth", 1))
    ahead = warmup[0] * len(request.stage_ranks[0])  # the most of all stages
    if request.num_microbatches < ahead:
        raise ScheduleError(
            f"2bw keeps two weight versions, so the warm-up may not exceed one minibatch: the warm-up of stage 0 is "
            f"{counted(ahead, 'microbatch')}, and a minibatch has {counted(request.num_microbatches, 'microbatch')}",
            remedy=f"--num-microbatches {ahead} or more, or --schedule pipedream",
        )
    return unflushed(KIND.name, request, warmup, [1] * request.num_stages, [count + 1 for count in warmup])


KIND = ScheduleKind(
    name="2bw",
    make=two_bw,
    description="no flush; two weight versions; gradients one step stale",
    source="PipeDream-2BW, arXiv:2006.09503, section 3.1",
    synchronous=False,
    weight_versions=2,
    min_microbatches=lambda num_stages, depth: depth * (num_stages - 1),
    example=line(3, 2, 2),
    options=(DEPTH,),
    planned_depths=(1, 2, 3),
)
