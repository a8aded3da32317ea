"""Compute-only schedule to one that can run: adds what the stages send each other.

A receive stands directly before the instruction that needs it (the runtime posts it earlier), a send directly behind
the one that made it. Two stages that meet on one rank for a microbatch exchange nothing: the runtime hands the values
over.
"""

from __future__ import annotations

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import Instruction, Schedule, StageEdges


def lower(schedule: Schedule, traffic: StageEdges) -> Schedule:
    """Return the schedule with SF, RF, SB and RB. Raises: ScheduleError where it has them, or a stage is unknown."""
    if schedule.lowered:
        raise ScheduleError(f"{schedule.name} has its sends and receives already", remedy="lower it once")
    request = schedule.request
    sources, targets = _ends(schedule, traffic)
    single = [ranks[0] if len(ranks) == 1 else -1 for ranks in request.stage_ranks]
    rows = []
    for rank, row in enumerate(schedule.rows):
        lowered: list[Instruction] = []
        for i in row:
            kind = "B" if i.op == "I" else i.op
            if kind not in ("F", "B"):
                lowered.append(i)
                continue
            stage, t, j = i.stage, i.minibatch, i.microbatch
            for peer in sources[kind][stage]:
                if (single[peer] if single[peer] >= 0 else request.rank_of(peer, t, j)) != rank:
                    lowered.append(Instruction("R" + kind, stage, t, j, -1, peer))
            lowered.append(i)
            for peer in targets[kind][stage]:
                if (single[peer] if single[peer] >= 0 else request.rank_of(peer, t, j)) != rank:
                    lowered.append(Instruction("S" + kind, stage, t, j, -1, peer))
        rows.append(tuple(lowered))
    return Schedule(schedule.name, request, tuple(rows), schedule.staleness, schedule.in_flight)


Ends = dict[str, list[list[int]]]


def _ends(schedule: Schedule, traffic: StageEdges) -> tuple[Ends, Ends]:
    """Return by kind ("F", "B") and stage: whom it hears from, and whom it tells, each in the order of ``traffic``."""
    count = schedule.request.num_stages
    sources: Ends = {kind: [[] for _ in range(count)] for kind in "FB"}
    targets: Ends = {kind: [[] for _ in range(count)] for kind in "FB"}
    for kind, edges in (("F", traffic.forward), ("B", traffic.backward)):
        for a, b in dict.fromkeys(edges):
            if not (0 <= a < count and 0 <= b < count) or (a < b) != (kind == "F") or a == b:
                raise ScheduleError(
                    f"{'activations' if kind == 'F' else 'gradients'} from stage {a} to stage {b} of {count}",
                    remedy="activations go to later stages, gradients to earlier ones",
                )
            sources[kind][b].append(a)
            targets[kind][a].append(b)
    return sources, targets
