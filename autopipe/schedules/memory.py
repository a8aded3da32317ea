"""What a schedule makes each rank hold, counted instruction by instruction: microbatches, weight versions, messages.

It shares nothing with the formulas by which planning knows how much is in flight, so each can be held against the
other.

A message is held from when its receive is posted, which is a little ahead of its turn (``post_points``), to the end of
what needs it: activations to the backward of their microbatch, gradients to the end of the backward that they start.
What two stages of one rank hand each other is not sent, and stays the memory of the stage that made it: an activation
to the end of that stage's backward, a gradient to the end of the backward that it starts. A gradient that is sent takes
its time to leave: it is counted to the end of the next compute instruction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import COMPUTE, RECEIVES, Instruction, Schedule
from autopipe.schedules.rows import stages_of

# how many compute instructions ahead a receive is posted: one lets a transfer hide behind the computation before it
LOOKAHEAD = 2
Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of one stage on a rank. ``fixed``: optimizer state, workspace; whatever is always there.

    ``version``: one weight version. ``in_flight``: from the forward of a microbatch to the end of its backward.
    ``between``: gradients that the half of a backward for the input leaves for the half for the weights.
    ``gradients``: of the weights, from the end of a minibatch's first backward to its step. ``first``: what that first
    backward takes on top, where it makes them while it still holds much else.
    """

    fixed: int
    version: int
    in_flight: int
    between: int = 0
    gradients: int = 0
    first: int = 0


@dataclass(frozen=True, slots=True)
class MessageBytes:
    """Bytes of the messages between stages: (from stage, to stage) -> bytes of a microbatch.

    ``forward``: activations, which the receiver's ``in_flight`` counts as well. ``backward``: gradients.
    """

    forward: Mapping[Edge, int] = field(default_factory=dict)
    backward: Mapping[Edge, int] = field(default_factory=dict)


def post_points(row: Sequence[Instruction]) -> dict[int, list[Instruction]]:
    """Say before which instruction of a row each receive is posted: ``LOOKAHEAD`` compute instructions before its turn.

    Returns: index in the row -> receives.
    """
    points: dict[int, list[Instruction]] = {}
    computes: list[int] = []
    for index, instruction in enumerate(row):
        if instruction.op in RECEIVES:
            point = computes[-LOOKAHEAD] if len(computes) >= LOOKAHEAD else 0
            points.setdefault(point, []).append(instruction)
        elif instruction.op in COMPUTE:
            computes.append(index)
    return points


def peak_bytes(schedule: Schedule, sizes: Sequence[StageBytes]) -> tuple[int, ...]:
    """Return the peak of every rank, messages aside. A version is dropped when no later minibatch may ask for it.

    Raises: ScheduleError where ``sizes`` are not those of the schedule's stages.
    """
    return tuple(
        max(sum(now.values()) for _, now in _usage(schedule, rank, sizes, MessageBytes()))
        for rank in range(len(schedule.rows))
    )


def stage_peaks(schedule: Schedule, sizes: Sequence[StageBytes], messages: MessageBytes) -> tuple[int, ...]:
    """Return the peak of every stage, on that of its ranks where it is highest, while the stage has its turn.

    ``schedule``: with its sends and receives. Stages of one rank may have their peaks at different times: together they
    are an upper bound of the rank's.

    Raises: ScheduleError as ``peak_bytes``.
    """
    peaks = [0] * schedule.request.num_stages
    for rank in range(len(schedule.rows)):
        for stage, now in _usage(schedule, rank, sizes, messages):
            peaks[stage] = max(peaks[stage], now[stage])
    return tuple(peaks)


def _usage(
    schedule: Schedule, rank: int, sizes: Sequence[StageBytes], messages: MessageBytes
) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield, at the worst moment of every instruction of a rank, its stage and what each stage of the rank holds."""
    if len(sizes) != schedule.request.num_stages:
        raise ScheduleError(f"bytes of {len(sizes)} stages for {schedule.request.num_stages}")
    books = _Books(schedule, rank, sizes, messages)
    for stage in books.now:
        yield stage, books.now
    row = schedule.rows[rank]
    ahead = post_points(row)
    for index, instruction in enumerate(row):
        for posted in ahead.get(index, ()):
            books.post(posted)
            yield posted.stage, books.now
        books.begin(instruction)
        yield instruction.stage, books.now
        books.end(instruction)


class _Books:
    """What each stage of a rank holds ``now``: ``begin`` and ``end`` an instruction; between the two it is most."""

    def __init__(self, schedule: Schedule, rank: int, sizes: Sequence[StageBytes], messages: MessageBytes) -> None:
        self._schedule, self._rank, self._sizes, self._messages = schedule, rank, sizes, messages
        stages = stages_of(schedule.request, rank)
        self._newest = dict.fromkeys(stages, schedule.request.first_minibatch)
        self.now = {s: sizes[s].fixed + self._versions(s) * sizes[s].version for s in stages}
        self._inputs = _by_end(messages.forward, 1, stages)
        self._arriving, self._departing = (_by_end(messages.backward, end, stages) for end in (1, 0))
        self._leaving: Counter[int] = Counter()  # bytes of gradients on their way, by the stage that sent them
        self._left: Counter[int] = Counter()
        self._begun: set[tuple[int, int]] = set()  # stages and minibatches whose weights have gradients

    def _versions(self, stage: int) -> int:
        return min(self._newest[stage], self._schedule.staleness[stage]) + 1

    def _here(self, edge: Edge, i: Instruction) -> bool:
        """Whether both ends of an edge of an instruction's stage are on this rank for its microbatch."""
        other = edge[0] if edge[1] == i.stage else edge[1]
        return other in self.now and self._schedule.request.rank_of(other, i.minibatch, i.microbatch) == self._rank

    def _handed(self, edges: Sequence[tuple[Edge, int]], i: Instruction) -> int:
        return sum(amount for edge, amount in edges if self._here(edge, i))

    def post(self, i: Instruction) -> None:
        """Make room for what is received."""
        edges = self._messages.forward if i.op == "RF" else self._messages.backward
        self.now[i.stage] += edges.get((i.peer, i.stage), 0)

    def begin(self, i: Instruction) -> None:
        """Take what an instruction needs."""
        size = self._sizes[i.stage]
        if i.op in COMPUTE:
            self._left, self._leaving = self._leaving, Counter()
        if i.op == "SB":
            amount = self._messages.backward.get((i.stage, i.peer), 0)
            self._leaving[i.stage] += amount
            self.now[i.stage] += amount
        elif i.op == "F":
            # what has arrived is there already, and what a stage of this rank made is that stage's
            self.now[i.stage] += size.in_flight - sum(amount for _, amount in self._inputs[i.stage])
        elif i.op == "I":
            self.now[i.stage] += size.between
        elif i.op in ("B", "W") and (i.stage, i.minibatch) not in self._begun:
            self.now[i.stage] += size.first
        elif i.op == "S":
            before = self._versions(i.stage)
            self._newest[i.stage] += 1
            self.now[i.stage] += (self._versions(i.stage) - before) * size.version

    def end(self, i: Instruction) -> None:
        """Give back what an instruction leaves behind no longer, and keep what it made."""
        size, departing = self._sizes[i.stage], self._departing[i.stage]
        # a stage that sends no gradient has no first half: what starts the backward waits for the second
        if i.op in ("B", "I" if departing else "W"):
            for edge, amount in self._arriving[i.stage]:
                self.now[edge[0] if self._here(edge, i) else i.stage] -= amount
        if i.op in ("B", "I"):
            self.now[i.stage] += self._handed(departing, i)
        if i.op in ("B", "W"):
            self.now[i.stage] -= size.in_flight - self._handed(self._inputs[i.stage], i)
            self.now[i.stage] -= size.between if i.op == "W" else 0
            if (i.stage, i.minibatch) not in self._begun:
                self._begun.add((i.stage, i.minibatch))
                self.now[i.stage] += size.gradients - size.first
        if i.op == "S" and (i.stage, i.minibatch) in self._begun:
            self.now[i.stage] -= size.gradients
        if i.op in COMPUTE:
            self.now.update({stage: self.now[stage] - amount for stage, amount in self._left.items()})


def _by_end(edges: Mapping[Edge, int], end: int, stages: Iterable[int]) -> dict[int, list[tuple[Edge, int]]]:
    """Return for each stage the edges that begin (0) or end (1) at it, with their bytes."""
    by_stage: dict[int, list[tuple[Edge, int]]] = {stage: [] for stage in stages}
    for edge, amount in edges.items():
        if edge[end] in by_stage:
            by_stage[edge[end]].append((edge, amount))
    return by_stage
