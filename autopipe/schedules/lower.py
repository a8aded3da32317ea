"""Lowering: adds sends and receives to a schedule that only computes.

A receive comes directly before the instruction that needs it (the runtime posts it earlier), a send directly after the
instruction that makes the value. If one rank runs both stages for a microbatch, there is no message: the runtime passes
the values on.
"""

from __future__ import annotations

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import RECEIVE_OF, SEND_OF, Instruction, Op, Schedule, StageEdges


def lower(schedule: Schedule, edges: StageEdges) -> Schedule:
    """Return the schedule with SF, RF, SB and RB.

    Raises: ScheduleError if the schedule already has them, or an edge names a stage that does not exist.
    """
    if schedule.lowered:
        raise ScheduleError(f"{schedule.name} already has sends and receives", remedy="lower it once")
    request = schedule.request
    sources, targets = _ends(schedule, edges)
    single = [ranks[0] if len(ranks) == 1 else -1 for ranks in request.stage_ranks]
    rows = []
    for rank, row in enumerate(schedule.rows):
        lowered: list[Instruction] = []
        for i in row:
            kind = Op.BACKWARD if i.op == Op.BACKWARD_INPUTS else i.op
            if kind not in SEND_OF:
                lowered.append(i)
                continue
            stage, t, j = i.stage, i.minibatch, i.microbatch
            for peer in sources[kind][stage]:
                if (single[peer] if single[peer] >= 0 else request.rank_of(peer, t, j)) != rank:
                    lowered.append(Instruction(RECEIVE_OF[kind], stage, t, j, -1, peer))
            lowered.append(i)
            for peer in targets[kind][stage]:
                if (single[peer] if single[peer] >= 0 else request.rank_of(peer, t, j)) != rank:
                    lowered.append(Instruction(SEND_OF[kind], stage, t, j, -1, peer))
        rows.append(tuple(lowered))
    return Schedule(schedule.name, request, tuple(rows), schedule.staleness, schedule.in_flight)


Ends = dict[Op, list[list[int]]]


def _ends(schedule: Schedule, stage_edges: StageEdges) -> tuple[Ends, Ends]:
    """Return, by kind (FORWARD, BACKWARD) and stage, the stages that it receives from and those that it sends to.

    Both are in the order of ``stage_edges``.
    """
    count = schedule.request.num_stages
    sources: Ends = {kind: [[] for _ in range(count)] for kind in SEND_OF}
    targets: Ends = {kind: [[] for _ in range(count)] for kind in SEND_OF}
    for kind, edges in ((Op.FORWARD, stage_edges.forward), (Op.BACKWARD, stage_edges.backward)):
        for a, b in dict.fromkeys(edges):
            if not (0 <= a < count and 0 <= b < count) or (a < b) != (kind == Op.FORWARD) or a == b:
                what = "activations" if kind == Op.FORWARD else "gradients"
                raise ScheduleError(
                    f"{what} cannot go from stage {a} to stage {b} of {count}",
                    remedy="send activations to later stages, and gradients to earlier ones",
                )
            sources[kind][b].append(a)
            targets[kind][a].append(b)
    return sources, targets
