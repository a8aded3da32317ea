"""The validator: checks any schedule, built-in or the user's own. An error carries the name of the broken rule.

======================  =============================================================================================
placement               stage, minibatch and microbatch exist; F, B, I, W run on the replica that round robin gives;
                        R, S, sends and receives on a rank of their stage
once                    each F once, and each B once (or one I and one W), per stage, minibatch and microbatch
stages-in-order         a rank with several stages runs F of an earlier stage first, and B of a later one
backward-after-forward  B and I come after their F, W after its I
same-version            B, I and W use the version that their F used
version-exists          the version that F uses exists when F runs
version-kept            that version is at most staleness older than the newest: the stash keeps staleness + 1
staleness               F of minibatch t at stage s uses version max(t - staleness of s, 0)
microbatch-order        the backwards of a stage run in microbatch order on each rank, so gradients add in that order
in-flight               no rank has more forwards without a backward than the schedule's bound
step-once               S (and R, if replicated) once per minibatch on every rank of a stage, in order; R after
                        the step of the previous minibatch
step-after-backward     S comes after the rank's last backward of its minibatch
gradients-apart         S, or R if there is one, comes before the rank's first backward of a later minibatch
reduce-before-step      R comes after the rank's last backward of its minibatch and before S, if replicated
message-place           a send comes after the instruction that makes its value, a receive before the one that needs it
channel-order           both ends of a channel name the same messages, each once, in the same order
resident                F, B, I, W and S of a spilled stage lie between its L and its U, and S behind its O
two-slabs               at most two stages of a rank are between their L and their U
messages-there          F and B of a microbatch whose messages are on the host come behind its L, and before its U
no-deadlock             all ranks finish if channels are first in, first out and sends never block
======================  =============================================================================================

A channel is (kind, from stage, to stage, from rank, to rank). ``validate`` checks all rows and channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import COMPUTE, COMPUTED_BY, COPIES, RECEIVES, SENDS, Instruction, Op, Schedule, StageEdges
from autopipe.schedules.costs import Costs
from autopipe.schedules.lower import lower
from autopipe.schedules.rows import marked, minibatches, own_microbatches, stages_of
from autopipe.schedules.simulate import simulate
from autopipe.schedules.spilling.spill import SLABS

RULES = (
    "placement", "once", "stages-in-order", "backward-after-forward", "same-version", "version-exists", "version-kept",
    "staleness", "microbatch-order", "in-flight", "step-once", "step-after-backward", "gradients-apart",
    "reduce-before-step", "message-place", "channel-order", "resident", "two-slabs", "messages-there", "no-deadlock",
)  # fmt: skip

_Work = tuple[int, int, int]  # stage, minibatch, microbatch
_Place = tuple[int, int]  # rank, index

_Broken = Iterator[tuple[str, str]]
"""(rule, what is wrong)."""


def validate(schedule: Schedule) -> None:
    """Check every rule. A schedule without messages is checked as a chain of stages.

    Raises: ScheduleError that names the first broken rule, with the instruction marked in the grid.
    """
    request = schedule.request
    if len(schedule.rows) != request.num_ranks or len(schedule.staleness) != request.num_stages:
        raise ScheduleError(
            f"the schedule has {len(schedule.rows)} rows, and a staleness for {len(schedule.staleness)} stages; "
            f"the request has {request.num_ranks} ranks and {request.num_stages} stages",
            rule="placement",
        )
    places: dict[tuple[Op, _Work], _Place] = {}
    for rank in range(request.num_ranks):
        _Row(schedule, rank, places).check()
    _check_channels(schedule)
    simulate(
        schedule if schedule.lowered else lower(schedule, StageEdges.chain(request.num_stages)),
        Costs.uniform(request.num_stages),
    )


Channel = tuple[Op, int, int, int, int]  # kind, from stage, to stage, from rank, to rank


def _check_channels(schedule: Schedule) -> None:
    """Check that both ends of every channel name the same messages in the same order."""
    request = schedule.request
    ends: dict[Channel, tuple[list[tuple[Instruction, _Place]], list[tuple[Instruction, _Place]]]] = {}
    for rank, row in enumerate(schedule.rows):
        for index, i in enumerate(row):
            if i.op in SENDS or i.op in RECEIVES:
                sends = i.op in SENDS
                other = request.rank_of(i.peer, i.minibatch, i.microbatch)
                edge = (i.stage, i.peer, rank, other) if sends else (i.peer, i.stage, other, rank)
                ends.setdefault((COMPUTED_BY[i.op], *edge), ([], []))[not sends].append((i, (rank, index)))
    for (kind, a, b, from_rank, to_rank), (sent, received) in sorted(ends.items(), key=lambda item: item[0]):
        name = f"channel {kind} from stage {a} (rank {from_rank}) to stage {b} (rank {to_rank})"
        for (first, _), (second, place) in zip(sent, received, strict=False):
            if (first.minibatch, first.microbatch) != (second.minibatch, second.microbatch):
                _broken(schedule, "channel-order", f"{name}: it sends {first} but receives {second}", *place)
        if len(sent) != len(received):
            extra = max(sent, received, key=len)[min(len(sent), len(received))]
            what = f"{name}: it sends {len(sent)} messages but receives {len(received)}"
            _broken(schedule, "channel-order", what, *extra[1])


def _broken(schedule: Schedule, rule: str, what: str, rank: int, index: int) -> NoReturn:
    """Raise: ScheduleError for a broken rule, with the grid, in which the instruction is marked."""
    raise ScheduleError(
        f"{schedule.name}: {what}",
        rule=rule,
        grid=marked(schedule, rank, index),
        where=f"rank {rank}, instruction {index}",
    )


class _Row:
    """The check of one rank's row, instruction by instruction.

    ``places``: the rank and index of each F, B, I and W, of all rows checked so far; this row adds its own.
    """

    def __init__(self, schedule: Schedule, rank: int, places: dict[tuple[Op, _Work], _Place]) -> None:
        self.schedule, self.request, self.rank, self.places = schedule, schedule.request, rank, places
        self.index = 0
        self.stages = stages_of(self.request, rank)
        self.window = minibatches(self.request)
        first = self.window.start
        self.newest = dict.fromkeys(self.stages, first)  # the newest weight version, by stage
        self.reduced = dict.fromkeys(self.stages, first)  # the next minibatch to reduce, by stage
        # backwards still to run, by (stage, minibatch)
        self.left = {(s, t): len(own_microbatches(self.request, s, rank, t)) for s in self.stages for t in self.window}
        self.last: dict[tuple[Op, int], tuple[int, int]] = {}  # latest backward, by (op, stage)
        self.versions: dict[_Work, int] = {}  # the version that each forward used
        self.in_flight = dict.fromkeys(self.stages, 0)
        self.residence = _Residence(schedule.rows[rank])

    def fail(self, rule: str, what: str) -> NoReturn:
        """Raise: ScheduleError for a rule that the current instruction breaks."""
        _broken(self.schedule, rule, what, self.rank, self.index)

    def check(self) -> None:
        """Check the whole row. Raises: ScheduleError for the first rule that is broken."""
        for self.index, i in enumerate(self.schedule.rows[self.rank]):  # noqa: B020 - the index is what fail() marks
            self._placement(i)
            for rule, what in self.residence.broken_by(i):
                self.fail(rule, what)
            if i.op in COPIES:
                continue
            if i.op == Op.FORWARD:
                self._forward(i)
            elif i.op in COMPUTE:
                self._backward(i)
            elif i.op in SENDS or i.op in RECEIVES:
                self._message(i)
            elif i.op == Op.REDUCE:
                self._reduce(i)
            else:
                self._step(i)
        self.index = len(self.schedule.rows[self.rank])
        for stage in self.stages:
            for t in self.window:
                if self.left[stage, t]:
                    self.fail("once", f"stage {stage} lacks {self.left[stage, t]} backwards of minibatch {t}")
            if self.newest[stage] != self.window.stop:
                self.fail("step-once", f"stage {stage} has no step for minibatch {self.newest[stage]}")
        for rule, what in self.residence.broken_by_end():
            self.fail(rule, what)

    def _placement(self, i: Instruction) -> None:
        if i.stage not in self.newest:
            self.fail("placement", f"{i} is on rank {self.rank}, which runs stages {list(self.stages)}")
        if i.minibatch not in self.window:
            self.fail(
                "placement", f"{i}: minibatch {i.minibatch} is outside {self.window.start}..{self.window.stop - 1}"
            )
        if i.op in (Op.REDUCE, Op.STEP) or (i.op in COPIES and i.microbatch < 0):
            return
        if not 0 <= i.microbatch < self.request.num_microbatches:
            self.fail("placement", f"{i}: microbatch {i.microbatch} of {self.request.num_microbatches}")
        right = self.request.rank_of(i.stage, i.minibatch, i.microbatch)
        if right != self.rank:
            self.fail("placement", f"{i} belongs on rank {right}")
        if (i.op in SENDS or i.op in RECEIVES) and not (0 <= i.peer < self.request.num_stages and i.peer != i.stage):
            self.fail("placement", f"{i}: stage {i.peer} does not exist")

    def _forward(self, i: Instruction) -> None:
        work = self._once(Op.FORWARD, i)
        self._in_order(Op.FORWARD, i, [s for s in self.stages if s > i.stage])
        delta = self.schedule.staleness[i.stage]
        if i.weight_version > self.newest[i.stage]:
            self.fail("version-exists", f"{i}: the newest version is {self.newest[i.stage]}")
        if i.weight_version < self.newest[i.stage] - delta:
            self.fail(
                "version-kept",
                f"{i}: version {i.weight_version} has been dropped; the newest is {self.newest[i.stage]}",
            )
        if i.weight_version != max(i.minibatch - delta, 0):
            self.fail("staleness", f"{i} should run at version {max(i.minibatch - delta, 0)} (staleness {delta})")
        self.versions[work] = i.weight_version
        self.in_flight[i.stage] += 1
        bound = self.schedule.in_flight
        if bound and self.in_flight[i.stage] > bound[i.stage]:
            self.fail(
                "in-flight",
                f"{i} makes {self.in_flight[i.stage]} microbatches in flight; the bound is {bound[i.stage]}",
            )

    def _backward(self, i: Instruction) -> None:
        work = self._once(i.op, i)
        halved = (Op.BACKWARD_INPUTS, work) in self.places
        if work not in self.versions or (i.op == Op.BACKWARD_WEIGHTS and not halved):
            needed = Op.BACKWARD_INPUTS if i.op == Op.BACKWARD_WEIGHTS else Op.FORWARD
            self.fail("backward-after-forward", f"{i} comes before its {needed}")
        if halved if i.op == Op.BACKWARD else (Op.BACKWARD, work) in self.places:
            self.fail("once", f"{i}: the backward of this microbatch has already run")
        if i.weight_version != self.versions[work]:
            self.fail("same-version", f"{i}: its forward ran at version {self.versions[work]}")
        if i.op != Op.BACKWARD_WEIGHTS:
            self._in_order(i.op, i, [s for s in self.stages if s < i.stage])
        order = (i.minibatch, i.microbatch)
        kind = Op.BACKWARD_WEIGHTS if i.op == Op.BACKWARD_WEIGHTS else Op.BACKWARD
        if self.last.get((kind, i.stage), order) > order:
            self.fail("microbatch-order", f"{i} comes after microbatch {self.last[kind, i.stage]}")
        self.last[kind, i.stage] = order
        if i.minibatch > max(self.newest[i.stage], self.reduced[i.stage]):
            self.fail("gradients-apart", f"{i} comes before the step of minibatch {self.newest[i.stage]}")
        if i.op != Op.BACKWARD_INPUTS:
            self.left[i.stage, i.minibatch] -= 1
            self.in_flight[i.stage] -= 1

    def _once(self, op: Op, i: Instruction) -> _Work:
        work = (i.stage, i.minibatch, i.microbatch)
        if (op, work) in self.places:
            self.fail("once", f"{i} appears twice")
        self.places[op, work] = self.rank, self.index
        return work

    def _in_order(self, op: Op, i: Instruction, must_follow: list[int]) -> None:
        for stage in must_follow:
            if (op, (stage, i.minibatch, i.microbatch)) in self.places:
                place = self.places[op, (stage, i.minibatch, i.microbatch)]
                if place[0] == self.rank:
                    self.fail("stages-in-order", f"{i} comes after {op} of stage {stage}, which needs it")

    def _message(self, i: Instruction) -> None:
        work = (i.stage, i.minibatch, i.microbatch)
        kind = COMPUTED_BY[i.op]
        done = (kind, work) in self.places or (kind == Op.BACKWARD and (Op.BACKWARD_INPUTS, work) in self.places)
        if done == (i.op in RECEIVES):
            self.fail("message-place", f"{i} comes {'after' if done else 'before'} the {kind} that it belongs to")

    def _reduce(self, i: Instruction) -> None:
        if not self.newest[i.stage] == self.reduced[i.stage] == i.minibatch:
            due = max(self.newest[i.stage], self.reduced[i.stage])
            after = "" if self.newest[i.stage] >= due else f"after step {due - 1}, "
            self.fail("step-once", f"{i}: {after}the next reduction of stage {i.stage} must be of minibatch {due}")
        if self.left[i.stage, i.minibatch]:
            self.fail(
                "reduce-before-step", f"{i} comes before {self.left[i.stage, i.minibatch]} backwards of its minibatch"
            )
        self.reduced[i.stage] += 1

    def _step(self, i: Instruction) -> None:
        if i.minibatch != self.newest[i.stage] or i.weight_version != i.minibatch:
            due = self.newest[i.stage]
            self.fail("step-once", f"{i}: the next step of stage {i.stage} must be of minibatch and version {due}")
        if self.left[i.stage, i.minibatch]:
            self.fail(
                "step-after-backward", f"{i} comes before {self.left[i.stage, i.minibatch]} backwards of its minibatch"
            )
        if len(self.request.stage_ranks[i.stage]) > 1 and self.reduced[i.stage] <= i.minibatch:
            self.fail("reduce-before-step", f"{i} comes before the reduction")
        self.newest[i.stage] += 1
        self.reduced[i.stage] = self.newest[i.stage]


class _Residence:
    """The stages and messages of one rank that are on the device, instruction by instruction."""

    def __init__(self, row: Sequence[Instruction]) -> None:
        self._spilled = {i.stage for i in row if i.op == Op.LOAD}
        self._of_messages = any(i.op == Op.LOAD and i.microbatch >= 0 for i in row)
        self._loaded: set[int] = set()
        self._with_optimizer: set[int] = set()
        self._messages: set[tuple[int, int, int]] = set()

    def broken_by(self, i: Instruction) -> _Broken:
        """Follow one instruction, and yield the rules that it breaks."""
        messages = i.stage, i.minibatch, i.microbatch
        if i.op == Op.LOAD and i.microbatch >= 0:
            self._messages.add(messages)
        elif i.op == Op.UNLOAD and i.microbatch >= 0:
            if messages not in self._messages:
                yield "messages-there", f"{i}: the messages of this microbatch are on the host already"
            self._messages.discard(messages)
        elif i.op == Op.LOAD:
            if i.stage in self._loaded:
                yield "resident", f"{i}: stage {i.stage} is on the device already"
            self._loaded.add(i.stage)
            if len(self._loaded) > SLABS:
                yield "two-slabs", f"{i} makes {len(self._loaded)} stages on the device; there is room for {SLABS}"
        elif i.op == Op.LOAD_OPTIMIZER:
            if i.stage not in self._loaded:
                yield "resident", f"{i}: stage {i.stage} is not on the device"
            self._with_optimizer.add(i.stage)
        elif i.op == Op.UNLOAD:
            if i.stage not in self._loaded:
                yield "resident", f"{i}: stage {i.stage} is not on the device"
            self._loaded.discard(i.stage)
            self._with_optimizer.discard(i.stage)
        elif i.stage in self._spilled and (i.op in COMPUTE or i.op == Op.STEP):
            if i.stage not in self._loaded:
                yield "resident", f"{i}: stage {i.stage} is not on the device"
            if i.op == Op.STEP and i.stage not in self._with_optimizer:
                yield "resident", f"{i}: the optimizer state of stage {i.stage} is not on the device"
            if i.op in COMPUTE and self._of_messages and messages not in self._messages:
                yield "messages-there", f"{i}: the messages of this microbatch are not on the device"

    def broken_by_end(self) -> _Broken:
        """Yield the rules that the end of the row breaks."""
        if self._loaded:
            yield "resident", f"stage {min(self._loaded)} is not given back at the end"
