"""Spilling: a pass that lets stages share one device that cannot contain them all.

The stages of a rank take turns on the device. Two of them are there at a time: the one that computes, and the next one,
whose weights are copied meanwhile into the other of two slabs. A schedule that runs all microbatches through one stage
before the next (``gpipe``) brings every stage at most twice per minibatch.

::

    3 stages, 2 microbatches, early steps
    compute | 0F0 0F1  1F0 1F1  2F0 2F1 2B0 2B1 2S  1B0 1B1 1S  0B0 0B1 0S
    H2D     | 0L 1L    2L           2O              1O 0L       0O
    D2H     |          0U                           2U          1U         0U

Steps. *Early*: a stage steps right behind its last backward, while its weights and gradients are on the device. *Late*:
if something is agreed over all stages first, such as a clipping factor, every stage gives its gradients back too, and a
second round brings the stages once more, for their steps.

Messages. Optionally, what stages give to one another is on the host between its producer and its consumer, and what a
stage keeps of a microbatch for its backward, too. L and U with a microbatch are these copies.

Source: Hydra, arXiv:2110.08633, section 4 (spilled execution with double buffering), where every microbatch brings each
shard again.

The schedule ``spilled`` is gpipe's order on one device::

    rank 0 | 0F0  0F1  1F0  1F1  2F0  2F1  2B0  2B1+ 1B0  1B1+ 0B0  0B1+

``spill`` adds the copies between host and device. A stage steps right behind its last backward; with ``late`` 1, all
stages step at the end. The numbers are those of gpipe, bit for bit.

Source: Hydra, arXiv:2110.08633, with all microbatches per visit of a stage (breadth first, arXiv:2211.05953).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import COMPUTE, Instruction, Op, Schedule, ScheduleSpec
from autopipe.schedules.gpipe import gpipe
from autopipe.schedules.kind import Option, ScheduleKind, check_request

SLABS = 2
"""How many stages of a rank have weights on the device at a time."""

LATE = Option("late", 0, 0, 1, "1: all stages step at the end of the minibatch")
MESSAGES = Option("messages_on_host", 0, 0, 1, "1: what stages exchange is on the host until it is needed")
OPTIMIZER_SLABS = Option("optimizer_slabs", 2, 1, 2, "how many stages may have optimizer state on the device at a time")


def spill(schedule: Schedule, *, late: bool = False, messages: bool = False) -> Schedule:
    """Return the schedule with L, O and U for all stages. ``messages``: between stages, they are on the host.

    ``schedule``: without sends and receives, one rank a stage, and with the steps of a minibatch at its end.
    """
    rows = []
    for row in schedule.rows:
        spilled: list[Instruction] = []
        for _, minibatch in itertools.groupby(row, key=lambda i: i.minibatch):
            spilled += _Minibatch(list(minibatch), late=late).row()
        rows.append(tuple(_with_messages(spilled) if messages else spilled))
    return dataclasses.replace(schedule, rows=tuple(rows))


class _Minibatch:
    """The visits of one minibatch: consecutive instructions of one stage, which is on the device meanwhile."""

    def __init__(self, row: Sequence[Instruction], *, late: bool) -> None:
        steps = {i.stage: i for i in row if i.op == Op.STEP}
        last = {i.stage: index for index, i in enumerate(row) if i.op in COMPUTE}
        self._early = {} if late else steps
        ordered = []
        for index, i in enumerate(row):
            if i.op in COMPUTE:
                ordered.append(i)
                if last[i.stage] == index and i.stage in self._early:
                    ordered.append(self._early[i.stage])
        # a stage that computes nothing in this minibatch steps too
        rest = [step for stage, step in steps.items() if late or stage not in last]
        self._visits = _visits(ordered)
        self._second_round = _visits(rest)

    def row(self) -> list[Instruction]:
        """Return the row."""
        row = _Resident()
        for k, visit in enumerate(self._visits):
            following = self._visits[k + 1][0].stage if k + 1 < len(self._visits) else None
            steps = any(i.op == Op.STEP for i in visit)
            row.visit(visit, following, optimizer=steps)
            if steps:
                row.unload(visit[0])
        if self._second_round:
            row.unload_all()  # the gradients of all stages are on the host before they are agreed on
        for k, visit in enumerate(self._second_round):
            following = self._second_round[k + 1][0].stage if k + 1 < len(self._second_round) else None
            row.visit(visit, following, optimizer=True)
            row.unload(visit[0])
        row.unload_all()
        return row.instructions


def _visits(row: Sequence[Instruction]) -> list[list[Instruction]]:
    return [list(visit) for _, visit in itertools.groupby(row, key=lambda i: i.stage)]


class _Resident:
    """The stages that are on the device, and the instructions so far."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self._loaded: dict[int, Instruction] = {}  # stage -> an instruction of it, the oldest first

    def visit(self, visit: Sequence[Instruction], following: int | None, *, optimizer: bool) -> None:
        """Add the instructions of a visit; ``following`` is the stage of the next one."""
        first = visit[0]
        self._load(first.stage, first, keep=first.stage)
        if optimizer:  # before the weights of the next stage: it is needed earlier
            self._add(Op.LOAD_OPTIMIZER, first)
        if following is not None:
            self._load(following, first, keep=first.stage)
        self.instructions += visit

    def _load(self, stage: int, like: Instruction, *, keep: int) -> None:
        if stage in self._loaded:
            return
        while len(self._loaded) >= SLABS:
            self.unload(next(i for s, i in self._loaded.items() if s != keep))
        self._loaded[stage] = Instruction(Op.LOAD, stage, like.minibatch)
        self.instructions.append(self._loaded[stage])

    def _add(self, op: Op, like: Instruction) -> None:
        self.instructions.append(Instruction(op, like.stage, like.minibatch))

    def unload(self, like: Instruction) -> None:
        """Give a stage back."""
        if self._loaded.pop(like.stage, None) is not None:
            self._add(Op.UNLOAD, like)

    def unload_all(self) -> None:
        """Give back all stages that are on the device."""
        for like in list(self._loaded.values()):
            self.unload(like)


def _with_messages(row: Sequence[Instruction]) -> Iterator[Instruction]:
    """Yield the row with the copies of each microbatch's messages. They come one computation ahead of their use."""
    computes = [i for i in row if i.op in COMPUTE]
    following = dict(itertools.pairwise(computes))
    if computes:
        yield _copy(Op.LOAD, computes[0])
    for i in row:
        if i.op not in COMPUTE:
            yield i
            continue
        ahead = following.get(i)
        # what the next instruction needs may be what this one makes
        early = ahead is not None and ahead.microbatch != i.microbatch
        if ahead is not None and early:
            yield _copy(Op.LOAD, ahead)
        yield i
        yield _copy(Op.UNLOAD, i)
        if ahead is not None and not early:
            yield _copy(Op.LOAD, ahead)


def _copy(op: Op, like: Instruction) -> Instruction:
    return Instruction(op, like.stage, like.minibatch, like.microbatch)


def spilled(request: ScheduleSpec) -> Schedule:
    """Return the schedule. Raises: ScheduleError for an invalid request, such as one with two ranks."""
    _check(request)
    options = request.options
    return spill(gpipe(request, KIND.name), late=bool(options.get("late")), messages=bool(options.get(MESSAGES.name)))


def _check(request: ScheduleSpec) -> None:
    check_request(KIND.name, request)
    if request.num_ranks > 1:
        raise ScheduleError(
            f"spilled runs all stages on one device; given {request.num_ranks}",
            remedy="use --gpus 1, or another schedule",
        )


KIND = ScheduleKind(
    name="spilled",
    make=spilled,
    description="a model larger than its device: stages take turns on it, their weights are kept on the host; exact",
    source="Hydra, arXiv:2110.08633",
    synchronous=True,
    in_flight="all",
    example=ScheduleSpec(((0,), (0,), (0,)), 2),
    options=(LATE, MESSAGES, OPTIMIZER_SLABS),
    several_stages=True,
    replicas=False,
    check=_check,
    spills=True,
)
