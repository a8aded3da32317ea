"""``Schedule``: rows of instructions, one row a rank. A pure value; nothing else in the project knows about 1F1B.

=====  ==================================================================================================
op     meaning (stage ``s``, minibatch ``t``, microbatch ``j``, weight version ``v``, peer stage ``q``)
=====  ==================================================================================================
F      forward of microbatch j at version v
B      backward of microbatch j, whose forward ran at version v
I, W   the two halves of B: gradient for the input, gradient for the weights
SF RF  send to / receive from stage q what its forward needs
SB RB  send to / receive from stage q the gradients that its backward needs
R      add up the gradients of replicas and of tied parameters
S      optimizer step t: version v becomes v + 1
=====  ==================================================================================================

Text form: ``2F7@3`` is stage 2, forward of microbatch 7, at version 3; ``2F1:7@3`` the same in minibatch 1 (minibatch 0
is not written); ``0SF7>1`` sends; ``1RF7<0`` receives; ``2S@3`` steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

COMPUTE = ("F", "B", "I", "W")
SENDS = ("SF", "SB")
RECEIVES = ("RF", "RB")
OPS = (*COMPUTE, *SENDS, *RECEIVES, "R", "S")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One thing that one rank does. ``peer`` is a stage, set on sends and receives."""

    op: str
    stage: int
    minibatch: int
    microbatch: int = -1
    weight_version: int = -1
    peer: int = -1

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"unknown operation {self.op!r}")

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
    """What a schedule is made for: a finite window of minibatches.

    ``stage_ranks[s]``: the ranks of stage s (several where it is replicated; a rank may run several stages).
    ``first_minibatch``: its number in the run, so that windows in a row name the versions that the formula gives.
    ``options``: what this schedule takes beyond that. ``text``: the user's own grid, for the schedule ``custom``.
    """

    stage_ranks: tuple[tuple[int, ...], ...]
    num_microbatches: int
    num_minibatches: int = 1
    first_minibatch: int = 0
    options: dict[str, int] = field(default_factory=dict)
    text: str = ""

    @property
    def num_stages(self) -> int:
        """How many stages."""
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        """How many ranks."""
        return 1 + max(rank for ranks in self.stage_ranks for rank in ranks)

    def rank_of(self, stage: int, minibatch: int, microbatch: int) -> int:
        """Return the rank that runs a microbatch at a stage: round robin over its replicas (1F1B-RR)."""
        ranks = self.stage_ranks[stage]
        return ranks[(minibatch * self.num_microbatches + microbatch) % len(ranks)]


@dataclass(frozen=True, slots=True)
class Schedule:
    """``rows[r]``: what rank r does, in order. ``staleness[s]``: the delta of docs/semantics.md, 0 for a flush.

    ``in_flight[s]``: the most microbatches that a rank of stage s may hold whose backward is not done; empty: no bound.
    """

    name: str
    request: ScheduleSpec
    rows: tuple[tuple[Instruction, ...], ...]
    staleness: tuple[int, ...]
    in_flight: tuple[int, ...] = ()

    @property
    def lowered(self) -> bool:
        """Whether communication has been added."""
        return any(i.op in SENDS or i.op in RECEIVES for row in self.rows for i in row)


@dataclass(frozen=True, slots=True)
class StageEdges:
    """Which stages exchange something for each microbatch: (from, to) pairs, for lowering.

    ``forward``: activations. ``backward``: gradients, and so from a later stage to an earlier one.
    """

    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int], ...]

    @staticmethod
    def chain(num_stages: int) -> StageEdges:
        """Return the traffic of a plain chain of stages."""
        forward = tuple((s, s + 1) for s in range(num_stages - 1))
        return StageEdges(forward, tuple((b, a) for a, b in forward))
