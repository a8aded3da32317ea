"""Drawings in plain text: a schedule as a grid of unit times, and a timeline to scale.

A cell of the grid is one unit of time: ``F3`` is the forward of microbatch 3, ``B1:3`` the backward of microbatch 3 of
minibatch 1 (minibatch 0 is not written). ``2F3`` names the stage, if a rank runs several; ``F3@2`` the weight version,
if the schedule has staleness. ``+`` after a cell: the optimizer steps. Messages and reductions take no time.
"""

from __future__ import annotations

from autopipe.ir.schedule import COMPUTE, COPIES, Instruction, Op, Schedule
from autopipe.ir.timeline import Timeline
from autopipe.schedules.costs import Costs
from autopipe.schedules.rows import table
from autopipe.schedules.simulate import simulate

_LANES = "", "load", "store"


def render(schedule: Schedule) -> str:
    """Return the grid: one line per rank, one column per unit of time; every F, B, I and W takes one unit.

    Raises: ScheduleError if the schedule deadlocks.
    """
    timeline = simulate(schedule, Costs.uniform(schedule.request.num_stages))
    stages_on = [len({i.stage for i in row}) for row in schedule.rows]
    with_stage, with_version = max(stages_on, default=1) > 1, any(schedule.staleness)
    cells: list[dict[int, str]] = [{} for _ in schedule.rows]
    steps = [_stepped_after(row) for row in schedule.rows]
    for span in timeline.spans:
        i = span.instruction
        if i.op not in COMPUTE:
            continue
        text = f"{i.stage if with_stage else ''}{i.op}{f'{i.minibatch}:' if i.minibatch else ''}{i.microbatch}"
        text += f"@{i.weight_version}" if with_version else ""
        cells[span.rank][round(span.start_seconds)] = text + ("+" if i in steps[span.rank] else "")
    length = max((column + 1 for row in cells for column in row), default=0)
    return table([[row.get(column, "") for column in range(length)] for row in cells])


def _stepped_after(row: tuple[Instruction, ...]) -> set[Instruction]:
    positions, last = set(), None
    for i in row:
        if i.op in COMPUTE:
            last = i
        elif i.op == Op.STEP and last is not None:
            positions.add(last)
    return positions


def render_timeline(timeline: Timeline, width: int = 100) -> str:
    """Return the timeline to scale in ``width`` columns. A column shows what took most of its time, blank if idle.

    Letters: F B I W as in schedules, S the step, R a reduction, ``.`` waiting for messages or handling them. If stages
    are spilled, L O U are the copies between host and device, in a line for each direction.
    """
    begin = min((span.start_seconds for span in timeline.spans), default=0.0)
    width, seconds = max(width, 1), timeline.seconds
    shares: dict[tuple[int, str], list[dict[str, float]]] = {}
    for rank in range(timeline.num_ranks):
        copies = any(span.instruction.op in COPIES for span in timeline.spans if span.rank == rank)
        for lane in _LANES if copies else _LANES[:1]:
            shares[rank, lane] = [{} for _ in range(width)]
    for span in timeline.spans if seconds > 0 else ():
        letter = span.instruction.op if len(span.instruction.op) == 1 else "."
        low = (span.start_seconds - begin) / seconds * width
        high = (span.end_seconds - begin) / seconds * width
        for column in range(int(low), min(int(high) + 1, width)):
            covered = min(high, column + 1) - max(low, column)
            share = shares[span.rank, _lane(span.instruction)][column]
            share[letter] = share.get(letter, 0.0) + covered
    digits = len(str(max(timeline.num_ranks - 1, 0)))
    lines = []
    for (rank, lane), columns in shares.items():
        text = "".join(_fullest(share) for share in columns)
        if lane:
            lines.append(f"{lane:>{5 + digits}} |{text}|")
            continue
        busy = timeline.busy_seconds(rank) / seconds if seconds else 0.0
        lines.append(f"rank {rank:>{digits}} |{text}| {busy:4.0%} busy")
    scale = f"{'':>{5 + digits}} 0{f'{seconds:.4g} s':>{width}}"
    footer = f"{timeline.source}; bubble {timeline.bubble_fraction:.1%}"
    return "\n".join([*lines, scale, footer])


def _lane(instruction: Instruction) -> str:
    if instruction.op not in COPIES:
        return ""
    return "store" if instruction.op == Op.UNLOAD else "load"


def _fullest(share: dict[str, float]) -> str:
    """Return the letter that fills most of a column, or a blank if idle time does."""
    idle = 1 - sum(share.values())
    letter, covered = max(share.items(), key=lambda item: item[1], default=(" ", 0.0))
    return letter if covered >= idle else " "
