"""What a schedule makes each rank hold: microbatches in flight and weight versions, counted instruction by instruction.

It shares nothing with the formulas that planning uses, so each can be held against the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import Schedule
from autopipe.schedules.rows import stages_of


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of one stage on a rank. ``fixed``: gradients, optimizer state, workspace; whatever is always there.

    ``version``: one weight version. ``in_flight``: from the forward of a microbatch to the end of its backward.
    ``between``: gradients that the half of a backward for the input leaves for the half for the weights.
    """

    fixed: int
    version: int
    in_flight: int
    between: int = 0


def peak_bytes(schedule: Schedule, sizes: Sequence[StageBytes]) -> tuple[int, ...]:
    """Return the peak of every rank. A version is dropped when no later minibatch may ask for it.

    Raises: ScheduleError where ``sizes`` are not those of the schedule's stages.
    """
    request = schedule.request
    if len(sizes) != request.num_stages:
        raise ScheduleError(f"bytes of {len(sizes)} stages for {request.num_stages}")
    peaks = []
    for rank, row in enumerate(schedule.rows):
        stages = stages_of(request, rank)
        newest = dict.fromkeys(stages, request.first_minibatch)
        versions = {stage: min(newest[stage], schedule.staleness[stage]) + 1 for stage in stages}
        now = sum(sizes[stage].fixed + versions[stage] * sizes[stage].version for stage in stages)
        peak = now
        for i in row:
            if i.op == "F":
                now += sizes[i.stage].in_flight
            elif i.op == "I":
                now += sizes[i.stage].between
            elif i.op == "B":
                now -= sizes[i.stage].in_flight
            elif i.op == "W":
                now -= sizes[i.stage].in_flight + sizes[i.stage].between
            elif i.op == "S":
                newest[i.stage] += 1
                held = min(newest[i.stage], schedule.staleness[i.stage]) + 1
                now += (held - versions[i.stage]) * sizes[i.stage].version
                versions[i.stage] = held
            peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)
