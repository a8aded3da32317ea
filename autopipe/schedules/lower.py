"""Lowering: adds sends and receives to a schedule that only computes; ``posts`` says when receives are posted.

A receive comes directly before the instruction that needs it (the runtime posts it earlier), a send directly after the
instruction that makes the value. If one rank runs both stages for a microbatch, there is no message: the runtime passes
the values on.

The receives of a rank are posted ahead of their turn, and in the order in which their sender sends. A receive is posted
``LOOKAHEAD`` compute instructions before the instruction that needs it, so that the transfer overlaps with computation.
All messages from one rank to another may share one communicator, which transfers them in the order of the sends. So a
receive is posted earlier still where its message is sent before another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import COMPUTE, RECEIVE_OF, RECEIVES, SEND_OF, SENDS, Instruction, Op, Schedule, StageEdges

LOOKAHEAD = 2

Posts = dict[int, list[Instruction]]  # index in a row -> the receives that are posted before that instruction, in order
Message = tuple[bool, int, int, int, int]  # whether it is an activation, from stage, to stage, minibatch, microbatch
_Arrivals = dict[tuple[int, int], deque[Message]]  # (from rank, to rank) -> messages in the order of the sends


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


@dataclass(frozen=True, slots=True)
class Turn:
    """An instruction of a rank."""

    instruction: Instruction
    posts: tuple[Instruction, ...]  # the receives that are posted directly before it, in order


def turns(schedule: Schedule, rank: int) -> tuple[Turn, ...]:
    """Return the instructions of a rank with the receives that each of them posts. Raises: as ``posts``."""
    ahead = posts(schedule, (rank,))[rank]
    return tuple(Turn(i, tuple(ahead.get(index, ()))) for index, i in enumerate(schedule.rows[rank]))


def posts(schedule: Schedule, ranks: Collection[int]) -> dict[int, Posts]:
    """Return, by rank, where its receives are posted.

    ``schedule``: with its sends and receives; without them, nothing is posted. Each receive is posted once, before its
    turn. Those from one rank are posted in the order of that rank's sends.

    Raises: ScheduleError if a message is received that is not sent.
    """
    mixed = {rank for rank in ranks if _is_mixed(schedule, rank)}
    arrivals = _arrivals(schedule, mixed) if mixed else {}
    return {
        rank: _in_order_of_sends(schedule, rank, arrivals) if rank in mixed else _latest(schedule.rows[rank])
        for rank in ranks
    }


def _is_mixed(schedule: Schedule, rank: int) -> bool:
    """Return whether a sender may send a rank messages of several channels, which only the sender's row orders."""
    channels = {(i.op, i.stage, i.peer) for i in schedule.rows[rank] if i.op in RECEIVES}
    senders = [sender for _, _, peer in channels for sender in schedule.request.stage_ranks[peer]]
    return len(set(senders)) < len(senders)


def _latest(row: Sequence[Instruction]) -> Posts:
    """Return where receives are posted at the latest: ``LOOKAHEAD`` compute instructions ahead of their turn."""
    points: Posts = {}
    computes: deque[int] = deque(maxlen=LOOKAHEAD)
    for index, i in enumerate(row):
        if i.op in RECEIVES:
            points.setdefault(computes[0] if len(computes) == LOOKAHEAD else 0, []).append(i)
        elif i.op in COMPUTE:
            computes.append(index)
    return points


def _arrivals(schedule: Schedule, ranks: Collection[int]) -> _Arrivals:
    arrivals: _Arrivals = {}
    for sender, row in enumerate(schedule.rows):
        for i in row:
            if i.op in SENDS:
                receiver = schedule.request.rank_of(i.peer, i.minibatch, i.microbatch)
                if receiver in ranks:
                    arrivals.setdefault((sender, receiver), deque()).append(_message(i))
    return arrivals


def _in_order_of_sends(schedule: Schedule, rank: int, arrivals: _Arrivals) -> Posts:
    receives = {_message(i): i for i in schedule.rows[rank] if i.op in RECEIVES}
    points: Posts = {}
    posted: set[Message] = set()
    for point, entries in _latest(schedule.rows[rank]).items():
        for i in entries:
            wanted, sender = _message(i), schedule.request.rank_of(i.peer, i.minibatch, i.microbatch)
            while wanted not in posted:
                due = arrivals.get((sender, rank))
                if not due or due[0] not in receives:
                    cause = "sends a message before it that is never received" if due else "never sends it"
                    raise ScheduleError(f"rank {rank} waits for {i}, but rank {sender} {cause}")
                message = due.popleft()
                posted.add(message)
                points.setdefault(point, []).append(receives[message])
    return points


def _message(i: Instruction) -> Message:
    """Return the message that a send or a receive transfers. It is equal at both ends."""
    ends = (i.stage, i.peer) if i.op in SENDS else (i.peer, i.stage)
    return i.op in (Op.SEND_FORWARD, Op.RECEIVE_FORWARD), *ends, i.minibatch, i.microbatch
