"""PipeDream: 1F1B without a flush. Each stage keeps the weights that the microbatches in flight started with.

Below, there are three stages and one microbatch per minibatch. ``B2:0`` is the backward of minibatch 2, on the version
that its forward used:

::

    rank 0 | F0@0    F1:0@0  F2:0@0                  B0@0+   F3:0@1  B1:0@0+         B2:0@0+         B3:0@1+
    rank 1 |         F0@0    F1:0@0          B0@0+   F2:0@1  B1:0@0+ F3:0@2  B2:0@1+         B3:0@2+
    rank 2 |                 F0@0    B0@0+   F1:0@1  B1:0@1+ F2:0@2  B2:0@2+ F3:0@3  B3:0@3+

The staleness is ``delta_s = ceil(warm-up of stage s / m)``, with the warm-up of all replicas together: ``p - 1 - s`` at
m = 1. With the option ``vertical_sync`` every stage has the largest ``delta_s``, so that a minibatch uses one version
of the whole model.

Bubble: only the first fill and the last drain. Memory: ``delta_s + 1`` versions; as many in flight as 1F1B.

Source: PipeDream, SOSP 2019, sections 3.2 (1F1B-RR) and 3.3 (weight stashing, vertical sync).
"""

from __future__ import annotations

from autopipe.ir.schedule import Schedule, ScheduleSpec
from autopipe.schedules.kind import DEPTH, Option, ScheduleKind, check_one_stage_a_rank, line
from autopipe.schedules.rows import unflushed, warmups


def pipedream(request: ScheduleSpec) -> Schedule:
    """Return the schedule. Raises: ScheduleError if a rank has two stages."""
    check_one_stage_a_rank(KIND.name, request)
    warmup = warmups(request, request.options.get("depth", 1))
    sent_ahead = [count * len(ranks) for count, ranks in zip(warmup, request.stage_ranks, strict=True)]
    staleness = [-(-ahead // request.num_microbatches) for ahead in sent_ahead]
    if request.options.get("vertical_sync", 0):
        staleness = [max(staleness)] * len(staleness)
    return unflushed(KIND.name, request, warmup, staleness, [count + 1 for count in warmup])


KIND = ScheduleKind(
    name="pipedream",
    make=pipedream,
    description="no flush; each stage stashes the weights of the microbatches in flight; stale gradients",
    source="PipeDream, SOSP 2019, section 3.3",
    synchronous=False,
    weight_versions="in flight",
    example=line(3, 1, 4),
    options=(DEPTH, Option("vertical_sync", 0, 0, 1, "1: all stages use the same version for a minibatch")),
)
