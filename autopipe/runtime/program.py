"""``Program``: the row of a rank as the executor runs it. What no minibatch changes is computed once for each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopipe.ir.messages import ACTIVATION, GRADIENT, Channel, Edge
from autopipe.ir.schedule import RECEIVES, SENDS, Instruction, Op, ScheduleSpec
from autopipe.schedules import Turn


@dataclass(slots=True, eq=False)
class Step:
    """One instruction of a row, and the receives that are posted before it."""

    instruction: Instruction
    # carries it out; None: the runtime does not implement it
    run: Callable[[Step, int], None] | None
    posts: tuple[Step, ...]
    # of the instruction
    op: Op
    stage: int
    minibatch: int
    microbatch: int
    # for a message, and for the computation that needs it: ACTIVATION or GRADIENT
    kind: str
    # of a message
    edge: Edge
    channel: Channel | None
    # it waits for another rank
    waits: bool
    # a backward that completes the gradients of a minibatch
    overlapping: bool
    # its text, and the parts of it around the number of the minibatch and the version
    _text: str
    _parts: tuple[str, str, str]

    @staticmethod
    def of(
        turn: Turn,
        request: ScheduleSpec,
        rank: int,
        handlers: Mapping[Op, Callable[[Step, int], None]],
        overlapping: frozenset[Instruction],
    ) -> Step:
        """Return the step of a turn of a rank."""
        i = turn.instruction
        kind = ACTIVATION if i.op in (Op.FORWARD, Op.SEND_FORWARD, Op.RECEIVE_FORWARD) else GRADIENT
        edge, channel = (-1, -1), None
        if i.op in SENDS or i.op in RECEIVES:
            other = request.rank_of(i.peer, i.minibatch, i.microbatch)
            edge, ranks = ((i.stage, i.peer), (rank, other)) if i.op in SENDS else ((i.peer, i.stage), (other, rank))
            channel = Channel(kind, *edge, *ranks)
        middle = f":{i.microbatch}" if i.microbatch >= 0 else ""
        tail = "" if i.peer < 0 else f"{'>' if i.op in SENDS else '<'}{i.peer}"
        return Step(
            instruction=i,
            run=handlers.get(i.op),
            posts=tuple(Step.of(Turn(post, ()), request, rank, handlers, frozenset()) for post in turn.posts),
            op=i.op,
            stage=i.stage,
            minibatch=i.minibatch,
            microbatch=i.microbatch,
            kind=kind,
            edge=edge,
            channel=channel,
            waits=i.op in RECEIVES,
            overlapping=i in overlapping,
            _text=str(i),
            _parts=(f"{i.stage}{i.op}", middle, tail),
        )

    def at(self, offset: int) -> Instruction:
        """Return the instruction ``offset`` minibatches later. Each flush adds one weight version."""
        i = self.instruction
        return (
            i
            if not offset
            else Instruction(i.op, i.stage, i.minibatch + offset, i.microbatch, self.version(offset), i.peer)
        )

    def version(self, offset: int) -> int:
        """Return the weight version of the instruction ``offset`` minibatches later."""
        version = self.instruction.weight_version
        return version + offset if version >= 0 else -1

    def text(self, offset: int) -> str:
        """Return ``str(self.at(offset))``."""
        if not offset:
            return self._text
        head, middle, tail = self._parts
        version = self.instruction.weight_version
        of_version = f"@{version + offset}" if version >= 0 else ""
        return f"{head}{self.minibatch + offset}{middle}{of_version}{tail}"


def overlapping_backwards(row: Sequence[Instruction]) -> frozenset[Instruction]:
    """Return the backwards that complete the gradients of a minibatch, whose sum over the replicas may start in them.

    The replicas of several stages may be the same ranks, which start all sums in the order of their R. So no sum starts
    while an earlier R is still to come, as with a last minibatch of fewer microbatches.
    """
    last: dict[tuple[int, int], int] = {}
    overlapping, previous = set(), -1
    for index, i in enumerate(row):
        if i.op == Op.BACKWARD:
            last[i.stage, i.minibatch] = index
        elif i.op == Op.REDUCE:
            backward = last.get((i.stage, i.minibatch), -1)
            if backward > previous:
                overlapping.add(row[backward])
            previous = index
    return frozenset(overlapping)
