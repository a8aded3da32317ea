"""The memory that a schedule needs on each rank, counted instruction by instruction.

The planner estimates the same memory with formulas. This module shares no code with them, so each verifies the other.

Memory of microbatches and weight versions is counted from the instruction that allocates it to the one that frees it.
A message takes memory from the moment at which its receive is posted (``lower.posts``): activations until the end of
the backward of their microbatch, gradients until the end of the backward that they start. Values that two stages of one
rank exchange are not sent, and count for the stage that made them: an activation until the end of that stage's
backward, a gradient until the end of the backward that it starts. A gradient that is sent counts until the end of the
next compute instruction, because the transfer takes time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import COMPUTE, Instruction, Op, Schedule
from autopipe.schedules.lower import Posts, posts
from autopipe.schedules.rows import stages_of

Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of one stage on a rank."""

    fixed: int  # always allocated: optimizer state, workspace
    version: int  # one weight version
    in_flight: int  # one microbatch, from its forward to the end of its backward
    between: int = 0  # gradients that I leaves for W, in a split backward
    gradients: int = 0  # of the weights: from the end of a minibatch's first backward to its step
    first: int = 0  # additional bytes during that first backward, which allocates the gradients


@dataclass(frozen=True, slots=True)
class MessageBytes:
    """Bytes of the messages between stages: (from stage, to stage) -> bytes of a microbatch."""

    forward: Mapping[Edge, int] = field(default_factory=dict)  # activations; the receiver's in_flight includes them
    backward: Mapping[Edge, int] = field(default_factory=dict)  # gradients


def peak_bytes(schedule: Schedule, sizes: Sequence[StageBytes]) -> tuple[int, ...]:
    """Return the peak bytes of every rank, without messages. A weight version counts until no minibatch can use it.

    Raises: ScheduleError if ``sizes`` has another number of stages than the schedule.
    """
    return tuple(
        max(sum(now.values()) for _, now in _usage(schedule, rank, ahead, sizes, MessageBytes()))
        for rank, ahead in _posts(schedule, sizes).items()
    )


def stage_peaks(schedule: Schedule, sizes: Sequence[StageBytes], messages: MessageBytes) -> tuple[int, ...]:
    """Return the peak bytes of every stage while it runs, on the rank where that is highest.

    ``schedule``: with its sends and receives. Stages of one rank may peak at different times, so their sum is an upper
    bound of the rank's peak.

    Raises: ScheduleError as ``peak_bytes``.
    """
    peaks = [0] * schedule.request.num_stages
    for rank, ahead in _posts(schedule, sizes).items():
        for stage, now in _usage(schedule, rank, ahead, sizes, messages):
            peaks[stage] = max(peaks[stage], now[stage])
    return tuple(peaks)


def _posts(schedule: Schedule, sizes: Sequence[StageBytes]) -> dict[int, Posts]:
    """Return the posts of all ranks. Raises: ScheduleError if ``sizes`` has another number of stages."""
    if len(sizes) != schedule.request.num_stages:
        raise ScheduleError(f"sizes of {len(sizes)} stages were given for {schedule.request.num_stages} stages")
    return posts(schedule, range(len(schedule.rows)))


def _usage(
    schedule: Schedule, rank: int, ahead: Posts, sizes: Sequence[StageBytes], messages: MessageBytes
) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield, at the peak of every instruction of a rank, its stage and the bytes of each stage of the rank."""
    usage = _Usage(schedule, rank, sizes, messages)
    for stage in usage.now:
        yield stage, usage.now
    for index, instruction in enumerate(schedule.rows[rank]):
        for posted in ahead.get(index, ()):
            usage.post(posted)
            yield posted.stage, usage.now
        usage.begin(instruction)
        yield instruction.stage, usage.now
        usage.end(instruction)


class _Usage:
    """The bytes of each stage of a rank, ``now``. They peak between ``begin`` and ``end`` of an instruction."""

    def __init__(self, schedule: Schedule, rank: int, sizes: Sequence[StageBytes], messages: MessageBytes) -> None:
        self._schedule, self._rank, self._sizes, self._messages = schedule, rank, sizes, messages
        stages = stages_of(schedule.request, rank)
        self._newest = dict.fromkeys(stages, schedule.request.first_minibatch)
        self.now = {s: sizes[s].fixed + self._versions(s) * sizes[s].version for s in stages}
        self._inputs = _by_end(messages.forward, 1, stages)
        self._arriving, self._departing = (_by_end(messages.backward, end, stages) for end in (1, 0))
        self._leaving: Counter[int] = Counter()  # bytes of gradients that are being sent, by sending stage
        self._sent: Counter[int] = Counter()  # the same, sent before the current compute instruction
        self._begun: set[tuple[int, int]] = set()  # (stage, minibatch) pairs whose weights have gradients

    def _versions(self, stage: int) -> int:
        return min(self._newest[stage], self._schedule.staleness[stage]) + 1

    def _here(self, edge: Edge, i: Instruction) -> bool:
        """Return whether this rank runs both ends of an edge of an instruction's stage, for its microbatch."""
        other = edge[0] if edge[1] == i.stage else edge[1]
        return other in self.now and self._schedule.request.rank_of(other, i.minibatch, i.microbatch) == self._rank

    def _handed(self, edges: Sequence[tuple[Edge, int]], i: Instruction) -> int:
        return sum(amount for edge, amount in edges if self._here(edge, i))

    def post(self, i: Instruction) -> None:
        """Add the bytes of a message whose receive is posted."""
        edges = self._messages.forward if i.op == Op.RECEIVE_FORWARD else self._messages.backward
        self.now[i.stage] += edges.get((i.peer, i.stage), 0)

    def begin(self, i: Instruction) -> None:
        """Add the bytes that an instruction allocates."""
        size = self._sizes[i.stage]
        if i.op in COMPUTE:
            self._sent, self._leaving = self._leaving, Counter()
        if i.op == Op.SEND_BACKWARD:
            amount = self._messages.backward.get((i.stage, i.peer), 0)
            self._leaving[i.stage] += amount
            self.now[i.stage] += amount
        elif i.op == Op.FORWARD:
            # messages were counted when they were posted; values of a stage on this rank count for that stage
            self.now[i.stage] += size.in_flight - sum(amount for _, amount in self._inputs[i.stage])
        elif i.op == Op.BACKWARD_INPUTS:
            self.now[i.stage] += size.between
        elif i.op in (Op.BACKWARD, Op.BACKWARD_WEIGHTS) and (i.stage, i.minibatch) not in self._begun:
            self.now[i.stage] += size.first
        elif i.op == Op.STEP:
            before = self._versions(i.stage)
            self._newest[i.stage] += 1
            self.now[i.stage] += (self._versions(i.stage) - before) * size.version

    def end(self, i: Instruction) -> None:
        """Subtract the bytes that an instruction frees, and add those of its result."""
        size, departing = self._sizes[i.stage], self._departing[i.stage]
        # a stage that sends no gradient does no work in I: the gradient that starts its backward is needed until W
        if i.op in (Op.BACKWARD, Op.BACKWARD_INPUTS if departing else Op.BACKWARD_WEIGHTS):
            for edge, amount in self._arriving[i.stage]:
                self.now[edge[0] if self._here(edge, i) else i.stage] -= amount
        if i.op in (Op.BACKWARD, Op.BACKWARD_INPUTS):
            self.now[i.stage] += self._handed(departing, i)
        if i.op in (Op.BACKWARD, Op.BACKWARD_WEIGHTS):
            self.now[i.stage] -= size.in_flight - self._handed(self._inputs[i.stage], i)
            self.now[i.stage] -= size.between if i.op == Op.BACKWARD_WEIGHTS else 0
            if (i.stage, i.minibatch) not in self._begun:
                self._begun.add((i.stage, i.minibatch))
                self.now[i.stage] += size.gradients - size.first
        if i.op == Op.STEP and (i.stage, i.minibatch) in self._begun:
            self.now[i.stage] -= size.gradients
        if i.op in COMPUTE:
            self.now.update({stage: self.now[stage] - amount for stage, amount in self._sent.items()})


def _by_end(edges: Mapping[Edge, int], end: int, stages: Iterable[int]) -> dict[int, list[tuple[Edge, int]]]:
    """Return for each stage the edges that begin (0) or end (1) at it, with their bytes."""
    by_stage: dict[int, list[tuple[Edge, int]]] = {stage: [] for stage in stages}
    for edge, amount in edges.items():
        if edge[end] in by_stage:
            by_stage[edge[end]].append((edge, amount))
    return by_stage
