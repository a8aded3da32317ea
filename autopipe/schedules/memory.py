"""What a schedule makes each rank hold, counted instruction by instruction: microbatches, weight versions, messages.

It shares nothing with the formulas that planning uses, so each can be held against the other.

A message is held from when its receive is posted, which is a little ahead of its turn (``post_points``), to the end of
what needs it: activations to the backward of their microbatch, gradients to the end of the backward that they start.
What two stages of one rank hand each other is not sent, and stays the memory of the stage that made it: an activation
to the end of that stage's backward, a gradient to the end of the backward that it starts. A gradient that is sent takes
its time to leave: it is counted to the end of the next compute instruction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    ``gradients``: of the weights, from the end of a minibatch's first backward to its step.
    """

    fixed: int
    version: int
    in_flight: int
    between: int = 0
    gradients: int = 0


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
        max(sum(now.values()) for _, now in _held(schedule, rank, sizes, MessageBytes()))
        for rank in range(len(schedule.rows))
    )


def stage_peaks(schedule: Schedule, sizes: Sequence[StageBytes], messages: MessageBytes) -> tuple[int, ...]:
    """Return the peak of every stage, on that of its ranks where it is highest, while the stage has its turn.

    ``schedule``: lowered, so that messages are received where they are.

    Raises: ScheduleError as ``peak_bytes``.
    """
    peaks = [0] * schedule.request.num_stages
    for rank in range(len(schedule.rows)):
        for stage, now in _held(schedule, rank, sizes, messages):
            peaks[stage] = max(peaks[stage], now[stage])
    return tuple(peaks)


def _held(
    schedule: Schedule, rank: int, sizes: Sequence[StageBytes], messages: MessageBytes
) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield, at the worst moment of every instruction of a rank, its stage and what each stage of the rank holds."""
    request, row = schedule.request, schedule.rows[rank]
    if len(sizes) != request.num_stages:
        raise ScheduleError(f"bytes of {len(sizes)} stages for {request.num_stages}")
    stages = stages_of(request, rank)
    newest = dict.fromkeys(stages, request.first_minibatch)
    versions = {stage: min(newest[stage], schedule.staleness[stage]) + 1 for stage in stages}
    now = {stage: sizes[stage].fixed + versions[stage] * sizes[stage].version for stage in stages}
    for stage in stages:
        yield stage, now

    def here(edges: Mapping[Edge, int], end: int, i: Instruction) -> dict[Edge, int]:
        """The edges that begin (0) or end (1) at an instruction's stage, both ends on this rank."""
        found = {edge: size for edge, size in edges.items() if edge[end] == i.stage and edge[1 - end] in now}
        return {
            edge: size
            for edge, size in found.items()
            if request.rank_of(edge[1 - end], i.minibatch, i.microbatch) == rank
        }

    ahead, leaving = post_points(row), Counter[int]()
    begun: set[tuple[int, int]] = set()  # stages and minibatches whose gradients have begun
    for index, i in enumerate(row):
        for posted in ahead.get(index, ()):
            edges = messages.forward if posted.op == "RF" else messages.backward
            now[posted.stage] += edges.get((posted.peer, posted.stage), 0)
            yield posted.stage, now
        size = sizes[i.stage]
        left = leaving if i.op in COMPUTE else Counter()
        if i.op == "SB":
            leaving[i.stage] += messages.backward.get((i.stage, i.peer), 0)
            now[i.stage] += messages.backward.get((i.stage, i.peer), 0)
            yield i.stage, now
        elif i.op == "F":
            # what has arrived is there already, and what a stage of this rank made is that stage's
            now[i.stage] += size.in_flight - sum(n for (_, to), n in messages.forward.items() if to == i.stage)
            yield i.stage, now
        elif i.op in ("B", "I"):
            now[i.stage] += size.between if i.op == "I" else 0
            yield i.stage, now
            handed = here(messages.backward, 1, i)
            for (maker, _), amount in handed.items():
                now[maker] -= amount
            now[i.stage] -= sum(n for e, n in messages.backward.items() if e[1] == i.stage and e not in handed)
            now[i.stage] += sum(here(messages.backward, 0, i).values())
        elif i.op == "S":
            newest[i.stage] += 1
            held = min(newest[i.stage], schedule.staleness[i.stage]) + 1
            now[i.stage] += (held - versions[i.stage]) * size.version
            versions[i.stage] = held
            yield i.stage, now
            if (i.stage, i.minibatch) in begun:
                now[i.stage] -= size.gradients
        if i.op in ("B", "W"):
            now[i.stage] -= size.in_flight - sum(here(messages.forward, 1, i).values())
            now[i.stage] -= size.between if i.op == "W" else 0
            if (i.stage, i.minibatch) not in begun:
                begun.add((i.stage, i.minibatch))
                now[i.stage] += size.gradients
        for stage, amount in left.items():
            now[stage] -= amount
        left.clear()
