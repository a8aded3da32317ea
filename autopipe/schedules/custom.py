"""The user's own schedule, as a grid of text: one line per rank, cells separated by commas. Empty cells are idle.

A cell is the stage, then F, B, I or W, then the microbatch: ``1F0`` (the format of torch.distributed.pipelining's
compute-only files). If the rank has one stage, ``F0`` is enough. ``#`` starts a comment. Blank lines are skipped, so
the line of an idle rank is a comma. The grid describes one minibatch; the optimizer steps after it, and every minibatch
runs in the same order. The grid is validated before anything else happens.

::

    rank 0 | F0  F1  F2  B0      B1      B2+
    rank 1 |     F0  B0  F1  B1  F2  B2+

Source: the user.
"""

from __future__ import annotations

import re

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import COMPUTE, Op, Schedule, ScheduleSpec
from autopipe.schedules.kind import ScheduleKind, check_request
from autopipe.schedules.rows import flushed, stages_of
from autopipe.schedules.validate import validate

_CELL = re.compile(r"(\d*)([FBIW])(\d+)")
Cell = tuple[Op, int, int]  # op, stage, microbatch


def custom(request: ScheduleSpec) -> Schedule:
    """Return the schedule in ``request.text``. Raises: ScheduleError if it cannot be parsed or breaks a rule."""
    check_request(KIND.name, request)
    lines = lines_of(request.text)
    if len(lines) != request.num_ranks:
        raise ScheduleError(
            f"the custom schedule has {len(lines)} rows for {request.num_ranks} ranks",
            remedy="write one line per rank, in order, with cells such as 1F0 separated by commas",
        )
    parts = [_parse(request, rank, text) for rank, text in enumerate(lines)]

    def order(rank: int, minibatch: int) -> list[Cell]:
        return parts[_part(request, rank, minibatch)]

    schedule = flushed(KIND.name, request, order, in_flight=())
    validate(schedule)
    return schedule


def layout_of(text: str) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Return (ranks of each stage, number of microbatches) of a grid.

    A cell that names no stage belongs to the stage with the number of its rank.

    Raises: ScheduleError if the grid cannot be parsed, or omits a stage or a microbatch.
    """
    lines = lines_of(text)
    ranks: dict[int, list[int]] = {}
    microbatches: set[int] = set()
    for rank, row in enumerate(lines):
        for stage, _, microbatch in _cells(rank, row):
            stage_ranks = ranks.setdefault(rank if stage is None else stage, [])
            if rank not in stage_ranks:
                stage_ranks.append(rank)
            microbatches.add(microbatch)
    for kind, numbers in (("stage", ranks), ("microbatch", microbatches)):
        missing = [number for number in range(max(numbers, default=-1) + 1) if number not in numbers]
        if missing or not numbers:
            what = f"lacks {kind} {missing[0]} of 0 to {max(numbers)}" if missing else "has no cells"
            raise ScheduleError(
                f"the custom schedule {what}",
                remedy=f"number the {kind}s from 0 without gaps",
            )
    return tuple(tuple(ranks[stage]) for stage in range(len(ranks))), len(microbatches)


def lines_of(text: str) -> list[str]:
    """Return the rows of a grid, without comments and blank lines."""
    return [row for row in (raw.split("#")[0].strip() for raw in text.splitlines()) if row]


def _cells(rank: int, text: str) -> list[tuple[int | None, Op, int]]:
    """Return (stage, op, microbatch) of a row. Raises: ScheduleError for an invalid cell."""
    cells = []
    for index, cell in enumerate(part.strip() for part in text.split(",")):
        if not cell:
            continue
        match = _CELL.fullmatch(cell)
        if match is None:
            raise _invalid_cell(cell, rank, index)
        cells.append((int(match[1]) if match[1] else None, Op(match[2]), int(match[3])))
    return cells


def _invalid_cell(cell: str, rank: int, index: int) -> ScheduleError:
    return ScheduleError(
        f"{cell!r} is not a cell of a schedule",
        where=f"rank {rank}, cell {index}",
        remedy="write the stage, then F, B, I or W, then the microbatch: 1F0",
    )


def _parse(request: ScheduleSpec, rank: int, text: str) -> list[Cell]:
    stages = stages_of(request, rank)
    cells = []
    for index, (stage, op, microbatch) in enumerate(_cells(rank, text)):
        if stage is None and len(stages) != 1:
            raise _invalid_cell(f"{op}{microbatch}", rank, index)
        cells.append((op, stages[0] if stage is None else stage, microbatch))
    return cells


def _part(request: ScheduleSpec, rank: int, minibatch: int) -> int:
    """Return the rank whose row of the grid ``rank`` runs in a minibatch.

    The replicas of a stage take turns if m is not a multiple of their number.
    """
    stages = stages_of(request, rank)
    shifted = [s for s in stages if minibatch * request.num_microbatches % len(request.stage_ranks[s])]
    if not shifted:
        return rank
    if len(stages) > 1:
        raise ScheduleError(
            f"{request.num_microbatches} microbatches are not a multiple of the "
            f"{len(request.stage_ranks[shifted[0]])} replicas of stage {shifted[0]}, so the grid would change from "
            f"minibatch to minibatch; that is not supported for rank {rank}, which has {len(stages)} stages",
            remedy="choose a number of microbatches that is a multiple of the replicas",
        )
    replicas = request.stage_ranks[stages[0]]
    return replicas[(replicas.index(rank) - minibatch * request.num_microbatches) % len(replicas)]


def to_csv(schedule: Schedule) -> str:
    """Return the first minibatch of a synchronous schedule in the format that ``custom`` reads.

    Raises: ScheduleError if minibatches overlap, because the format describes one minibatch.
    """
    if any(schedule.staleness):
        raise ScheduleError(
            f"{schedule.name} overlaps minibatches; a custom schedule describes one minibatch and a flush"
        )
    first = schedule.request.first_minibatch
    rows = (
        ",".join(f"{i.stage}{i.op}{i.microbatch}" for i in row if i.op in COMPUTE and i.minibatch == first) or ","
        for row in schedule.rows
    )
    return "\n".join(rows) + "\n"


KIND = ScheduleKind(
    name="custom",
    make=custom,
    description="your own grid, validated before it runs; exact",
    source="the user's own text",
    synchronous=True,
    in_flight="all",
    example=ScheduleSpec(((0,), (1,)), 3, text="F0,F1,F2,B0,B1,B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"),
    several_stages=True,
)
