"""The validator: checks any schedule, built-in or the user's own, against the rules of ``rules``."""

from __future__ import annotations

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import COMPUTED_BY, RECEIVES, SENDS, Instruction, Op, Schedule, StageEdges
from autopipe.schedules.costs import Costs
from autopipe.schedules.lower import lower
from autopipe.schedules.rules import Place, Row, Work, broken
from autopipe.schedules.simulate import simulate


def validate(schedule: Schedule) -> None:
    """Check every rule. A schedule without messages is checked as a chain of stages.

    Raises: ScheduleError that names the first broken rule, with the instruction marked in the grid.
    """
    request = schedule.request
    if len(schedule.rows) != request.num_ranks or len(schedule.staleness) != request.num_stages:
        raise ScheduleError(
            f"the schedule has {len(schedule.rows)} rows, and a staleness for {len(schedule.staleness)} stages; "
            f"the request has {request.num_ranks} ranks and {request.num_stages} stages",
            rule="placement",
        )
    places: dict[tuple[Op, Work], Place] = {}
    for rank in range(request.num_ranks):
        Row(schedule, rank, places).check()
    _check_channels(schedule)
    simulate(
        schedule if schedule.lowered else lower(schedule, StageEdges.chain(request.num_stages)),
        Costs.uniform(request.num_stages),
    )


Channel = tuple[Op, int, int, int, int]  # kind, from stage, to stage, from rank, to rank


def _check_channels(schedule: Schedule) -> None:
    """Check that both ends of every channel name the same messages in the same order."""
    request = schedule.request
    ends: dict[Channel, tuple[list[tuple[Instruction, Place]], list[tuple[Instruction, Place]]]] = {}
    for rank, row in enumerate(schedule.rows):
        for index, i in enumerate(row):
            if i.op in SENDS or i.op in RECEIVES:
                sends = i.op in SENDS
                other = request.rank_of(i.peer, i.minibatch, i.microbatch)
                edge = (i.stage, i.peer, rank, other) if sends else (i.peer, i.stage, other, rank)
                ends.setdefault((COMPUTED_BY[i.op], *edge), ([], []))[not sends].append((i, (rank, index)))
    for (kind, a, b, from_rank, to_rank), (sent, received) in sorted(ends.items(), key=lambda item: item[0]):
        name = f"channel {kind} from stage {a} (rank {from_rank}) to stage {b} (rank {to_rank})"
        for (first, _), (second, place) in zip(sent, received, strict=False):
            if (first.minibatch, first.microbatch) != (second.minibatch, second.microbatch):
                broken(schedule, "channel-order", f"{name}: it sends {first} but receives {second}", *place)
        if len(sent) != len(received):
            extra = max(sent, received, key=len)[min(len(sent), len(received))]
            what = f"{name}: it sends {len(sent)} messages but receives {len(received)}"
            broken(schedule, "channel-order", what, *extra[1])
