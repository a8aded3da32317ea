"""``Schedule``: rows of instructions, one row per rank. The runtime executes the rows of any schedule in the same way.

=====  ==================================================================================================
op     meaning (stage ``s``, minibatch ``t``, microbatch ``j``, weight version ``v``, peer stage ``q``)
=====  ==================================================================================================
F      forward of microbatch j at version v
B      backward of microbatch j, whose forward ran at version v
I, W   the two halves of B: gradient for the input, gradient for the weights
SF     send to stage q the activations that its forward needs
RF     receive from stage q the activations that the forward of s needs
SB RB  the same for the gradients that a backward needs
R      add the gradients of replicas and of tied parameters
S      optimizer step t: version v becomes v + 1
L      begin to bring the weights of s from the host to the device; with j: what microbatch j needs of its messages
O      begin to bring the optimizer state of s to the device
U      give back to the host what is there of s, and write what has changed; with j: the messages of microbatch j
=====  ==================================================================================================

Text form: ``2F7@3`` is the forward of microbatch 7 at stage 2, at version 3; ``2F1:7@3`` is the same in minibatch 1
(minibatch 0 is not written). ``0SF7>1`` sends from stage 0 to 1, ``1RF7<0`` receives, and ``2S@3`` steps.
L, O and U are those of a spilled stage. L and O only begin a copy: the first F, B or S that needs it waits for it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Op(enum.StrEnum):
    """The operation of an instruction. Its value is the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUTS = "I"
    BACKWARD_WEIGHTS = "W"
    SEND_FORWARD = "SF"
    SEND_BACKWARD = "SB"
    RECEIVE_FORWARD = "RF"
    RECEIVE_BACKWARD = "RB"
    REDUCE = "R"
    STEP = "S"
    LOAD = "L"
    LOAD_OPTIMIZER = "O"
    UNLOAD = "U"


COMPUTE = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUTS, Op.BACKWARD_WEIGHTS)
SEND_OF = {Op.FORWARD: Op.SEND_FORWARD, Op.BACKWARD: Op.SEND_BACKWARD}
RECEIVE_OF = {Op.FORWARD: Op.RECEIVE_FORWARD, Op.BACKWARD: Op.RECEIVE_BACKWARD}
# between the host and the device, of a spilled stage
COPIES = (Op.LOAD, Op.LOAD_OPTIMIZER, Op.UNLOAD)
SENDS, RECEIVES = tuple(SEND_OF.values()), tuple(RECEIVE_OF.values())
# the computation that a message belongs to
COMPUTED_BY = {message: op for messages in (SEND_OF, RECEIVE_OF) for op, message in messages.items()}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation of one rank. Fields that do not apply to an operation are -1."""

    op: Op
    stage: int
    minibatch: int
    microbatch: int = -1
    weight_version: int = -1
    peer: int = -1  # the other stage of a send or receive

    def __post_init__(self) -> None:
        if not isinstance(self.op, Op):
            raise TypeError(f"{self.op!r} is not an Op")

    def __str__(self) -> str:
        text = f"{self.stage}{self.op}"
        if self.minibatch:
            text += f"{self.minibatch}" + (":" if self.microbatch >= 0 else "")
        if self.microbatch >= 0:
            text += f"{self.microbatch}"
        if self.weight_version >= 0:
            text += f"@{self.weight_version}"
        if self.peer >= 0:
            text += f"{'>' if self.op in SENDS else '<'}{self.peer}"
        return text


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """The layout and size of a schedule, which covers a finite window of minibatches."""

    # stage_ranks[s]: the ranks of stage s, several if it is replicated; a rank may run several stages
    stage_ranks: tuple[tuple[int, ...], ...]
    num_microbatches: int  # per minibatch
    num_minibatches: int = 1  # in the window
    first_minibatch: int = 0  # number of the window's first minibatch in the run, which determines weight versions
    options: dict[str, int] = field(default_factory=dict)  # parameters of the schedule
    text: str = ""  # the user's own grid, for the schedule ``custom``

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return 1 + max(rank for ranks in self.stage_ranks for rank in ranks)

    def rank_of(self, stage: int, minibatch: int, microbatch: int) -> int:
        """Return the rank that runs a microbatch at a stage: round robin over its replicas (1F1B-RR)."""
        ranks = self.stage_ranks[stage]
        return ranks[(minibatch * self.num_microbatches + microbatch) % len(ranks)]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The instructions of all ranks for one window of minibatches."""

    name: str
    request: ScheduleSpec
    rows: tuple[tuple[Instruction, ...], ...]  # by rank, in execution order
    staleness: tuple[int, ...]  # by stage: the delta of docs/semantics.md; 0 if the schedule flushes
    in_flight: tuple[int, ...] = ()  # by stage: the most microbatches in flight on one of its ranks; (): no bound

    @property
    def spilled(self) -> bool:
        """Whether stages take turns on a device."""
        return any(i.op == Op.LOAD for row in self.rows for i in row)

    @property
    def lowered(self) -> bool:
        """Whether the rows include sends and receives."""
        return any(i.op in SENDS or i.op in RECEIVES for row in self.rows for i in row)


@dataclass(frozen=True, slots=True)
class StageEdges:
    """The (from stage, to stage) pairs that exchange messages for each microbatch, for lowering."""

    forward: tuple[tuple[int, int], ...]  # activations
    backward: tuple[tuple[int, int], ...]  # gradients, from a later stage to an earlier one

    @staticmethod
    def chain(num_stages: int) -> StageEdges:
        """Return the edges of a plain chain of stages."""
        forward = tuple((s, s + 1) for s in range(num_stages - 1))
        return StageEdges(forward, tuple((b, a) for a, b in forward))
