"""``Executor``: runs the instructions of one rank in order, with one method per operation.

The rank gets its row of a lowered schedule; nothing here knows a schedule by name. Receives are posted ahead of their
turn, so that the transfer overlaps with computation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopipe.errors import InternalError, RunError
from autopipe.ir.channel import ACTIVATION, GRADIENT, Channel
from autopipe.ir.messages import Edge
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import COMPUTE, COPIES, RECEIVES, Instruction, Op, ScheduleSpec
from autopipe.runtime.batches.on_device import on_host
from autopipe.runtime.batches.recording import Recording
from autopipe.runtime.events import Reporter
from autopipe.runtime.footprint import Footprint
from autopipe.runtime.spans import SpanRecorder
from autopipe.runtime.spilling.books import DeviceBooks
from autopipe.runtime.spilling.spiller import Spiller
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.step.stepper import Stepper
from autopipe.runtime.transport.base import Pending, Transport
from autopipe.schedules import Turn
from autopipe.strides import Layout


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A part of a minibatch, ready to run."""

    # the tensors of the batch, by name
    leaves: Mapping[str, torch.Tensor]
    # the share of the minibatch loss
    factor: float
    # the sizes of the symbols of the graph
    sizes: Mapping[str, int]
    # the capture that the microbatch follows
    recording: Recording


@dataclass(slots=True)
class Executor:
    """Runs the rows of one rank."""

    plan: Plan
    request: ScheduleSpec
    runners: dict[int, StageRunner]
    stepper: Stepper
    transport: Transport
    reporter: Reporter
    # times the instructions; None unless a timeline is recorded
    recorder: SpanRecorder | None = None
    # attributes allocations to stages; None unless memory is measured
    footprint: Footprint | DeviceBooks | None = None
    # moves the stages between host and device; None unless they take turns
    spiller: Spiller | None = None
    current: Instruction | None = None
    # the tensors of a message, from arrival or production until they are read or sent
    _mail: dict[tuple[str, Edge, int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    _posted: dict[Instruction, list[Pending]] = field(default_factory=dict)
    _minibatches: Mapping[int, Sequence[Microbatch]] = field(default_factory=dict)
    _overlapping: frozenset[Instruction] = frozenset()
    _training: bool = True

    def run(
        self,
        row: Sequence[Turn],
        minibatches: Mapping[int, Sequence[Microbatch]],
        *,
        offset: int = 0,
        training: bool = True,
    ) -> None:
        """Run a row. ``minibatches``: the microbatches of each minibatch in the row.

        ``offset`` is added to every minibatch number, so that the row of one flushed minibatch serves them all. If a
        minibatch has fewer microbatches than the schedule (a ragged last batch), every rank skips the same
        instructions.
        """
        self._minibatches, self._training = minibatches, training
        row = [turn if not offset else _shifted(turn, offset) for turn in row]
        self._overlapping = _overlapping_backwards(
            [turn.instruction for turn in row if self._is_present(turn.instruction)]
        )
        handlers: dict[Op, Callable[[Instruction], None]] = {
            Op.FORWARD: self._forward, Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUTS: self._backward_inputs, Op.BACKWARD_WEIGHTS: self._backward_weights,
            Op.SEND_FORWARD: self._send, Op.SEND_BACKWARD: self._send,
            Op.RECEIVE_FORWARD: self._receive, Op.RECEIVE_BACKWARD: self._receive,
            Op.REDUCE: self._reduce, Op.STEP: self._step,
            Op.LOAD: self._load, Op.LOAD_OPTIMIZER: self._load, Op.UNLOAD: self._load,
        }  # fmt: skip
        with contextlib.nullcontext() if self.footprint is None else self.footprint.owners:
            for turn in row:
                for posted in filter(self._is_present, turn.posts):
                    with self._measured(posted):
                        self._post(posted)
                instruction = turn.instruction
                if not self._is_present(instruction):
                    continue
                self.current = instruction
                self.reporter.at(str(instruction), waiting=instruction.op in RECEIVES)
                handler = handlers.get(instruction.op)
                if handler is None:
                    raise InternalError(f"the runtime does not implement {instruction.op!r} ({instruction})")
                copies = instruction.op in COPIES  # the lanes time these
                timed = self.recorder.during(instruction) if self.recorder and not copies else contextlib.nullcontext()
                if self.spiller is not None and (instruction.op in COMPUTE or instruction.op == Op.STEP):
                    self.spiller.ready(instruction)
                with timed, self._measured(instruction):
                    handler(instruction)
        self.current = None

    def _is_present(self, instruction: Instruction) -> bool:
        """Return whether the minibatch has the microbatch of an instruction."""
        return instruction.microbatch < len(self._minibatches[instruction.minibatch])

    def _measured(self, instruction: Instruction) -> contextlib.AbstractContextManager[None]:
        """Return the context in which an instruction runs, which attributes its memory to its stage."""
        if self.footprint is None:
            return contextlib.nullcontext()
        leaves = on_host(self._microbatch(instruction).leaves) if instruction.op == Op.FORWARD else {}
        names = self.runners[instruction.stage].stage.INPUTS
        return self.footprint.during(instruction, [leaves[name] for name in names if name in leaves])

    def _peer_rank(self, instruction: Instruction, stage: int) -> int:
        return self.request.rank_of(stage, instruction.minibatch, instruction.microbatch)

    def _edges(self, kind: str, instruction: Instruction) -> Mapping[Edge, tuple[str, ...]]:
        """Return the values of each message of a microbatch, by edge."""
        message_plan = self._microbatch(instruction).recording.message_plan
        return message_plan.forward if kind == ACTIVATION else message_plan.backward

    def _microbatch(self, instruction: Instruction) -> Microbatch:
        return self._minibatches[instruction.minibatch][instruction.microbatch]

    def _key(self, instruction: Instruction) -> tuple[int, int]:
        return instruction.minibatch, instruction.microbatch

    def _post(self, instruction: Instruction) -> None:
        kind = ACTIVATION if instruction.op == Op.RECEIVE_FORWARD else GRADIENT
        edge = (instruction.peer, instruction.stage)
        channel = Channel(kind, *edge, self._peer_rank(instruction, instruction.peer), self.transport.rank)
        layouts = self._layouts(self._microbatch(instruction), self._edges(kind, instruction).get(edge, ()))
        self._posted[instruction] = self.transport.receive_message(channel, layouts)

    def _layouts(self, microbatch: Microbatch, values: Iterable[str]) -> list[Layout]:
        """Return the layouts of the values of a message. A gradient is sent in the memory order of its value."""
        specs = [microbatch.recording.specs[value] for value in values]
        return [Layout(spec.concrete(microbatch.sizes), getattr(torch, spec.dtype), spec.order) for spec in specs]

    def _receive(self, instruction: Instruction) -> None:
        kind = ACTIVATION if instruction.op == Op.RECEIVE_FORWARD else GRADIENT
        edge = (instruction.peer, instruction.stage)
        tensors = [pending.wait() for pending in self._posted.pop(instruction)]
        self._mail[kind, edge, instruction.minibatch, instruction.microbatch] = dict(
            zip(self._edges(kind, instruction).get(edge, ()), tensors, strict=True)
        )

    def _deliver(self, kind: str, instruction: Instruction, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep the outputs of an instruction for a send, or for a stage on this rank."""
        for edge, values in self._edges(kind, instruction).items():
            if edge[0] == instruction.stage:
                key = kind, edge, instruction.minibatch, instruction.microbatch
                # each reader gets its own tensor object, because each collects its own gradient
                self._mail[key] = {value: tensors[value].detach() for value in values}

    def _send(self, instruction: Instruction) -> None:
        kind = ACTIVATION if instruction.op == Op.SEND_FORWARD else GRADIENT
        edge = (instruction.stage, instruction.peer)
        channel = Channel(kind, *edge, self.transport.rank, self._peer_rank(instruction, instruction.peer))
        microbatch = self._microbatch(instruction)
        # empty if this microbatch sends nothing over the edge
        tensors = self._mail.pop((kind, edge, instruction.minibatch, instruction.microbatch), {})
        layouts = self._layouts(microbatch, tensors)
        for (value, tensor), layout in zip(tensors.items(), layouts, strict=True):
            if tuple(tensor.shape) != layout.shape or tensor.dtype != layout.dtype:
                raise RunError(
                    f"{value} must be {str(layout.dtype).removeprefix('torch.')}{list(layout.shape)} here, and is "
                    f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}",
                    where=f"stage {instruction.stage}, before it is sent to stage {instruction.peer}",
                    remedy="the shape depends on more than the shapes of the batch: let it follow from them alone, or "
                    "train in one stage (--gpus 1)",
                )
        self.transport.send_message(channel, list(tensors.values()), layouts)

    def _take(self, kind: str, instruction: Instruction) -> dict[str, torch.Tensor]:
        """Return the tensors from other stages, in the order in which autograd would have added them."""
        tensors: dict[str, torch.Tensor] = {}
        for edge in self._edges(kind, instruction):
            if edge[1] == instruction.stage:
                tensors.update(self._mail.pop((kind, edge, instruction.minibatch, instruction.microbatch)))
        return tensors

    def _forward(self, instruction: Instruction) -> None:
        runner = self.runners[instruction.stage]
        microbatch = self._microbatch(instruction)
        name = microbatch.recording.name
        inputs = [microbatch.leaves[entry] for entry in runner.variants[name].code.INPUTS]
        received = self._take(ACTIVATION, instruction)
        key = self._key(instruction)
        if not self._training:
            self._deliver(ACTIVATION, instruction, runner.evaluate(key, inputs, received, microbatch.factor, name))
            return
        runner.versions.use(instruction.weight_version)
        self._deliver(ACTIVATION, instruction, runner.forward(key, inputs, received, microbatch.factor, name))

    def _backward(self, instruction: Instruction) -> None:
        runner = self.runners[instruction.stage]
        runner.versions.use(instruction.weight_version)
        key = self._key(instruction)
        arrived = self._take(GRADIENT, instruction)
        overlapping = instruction in self._overlapping
        with self.stepper.overlapping(instruction.stage) if overlapping else contextlib.nullcontext():
            gradients = runner.backward(key, arrived)
        self._deliver(GRADIENT, instruction, gradients)

    def _backward_inputs(self, instruction: Instruction) -> None:
        runner = self.runners[instruction.stage]
        runner.versions.use(instruction.weight_version)
        gradients = runner.backward_inputs(self._key(instruction), self._take(GRADIENT, instruction))
        self._deliver(GRADIENT, instruction, gradients)

    def _backward_weights(self, instruction: Instruction) -> None:
        self.runners[instruction.stage].backward_weights(self._key(instruction))

    def _reduce(self, instruction: Instruction) -> None:
        self.stepper.reduce(instruction.stage, instruction.minibatch)

    def _step(self, instruction: Instruction) -> None:
        self.stepper.step(instruction.stage, instruction.minibatch)
        if self.spiller is not None:
            self.spiller.stepped(instruction.stage)

    def _load(self, instruction: Instruction) -> None:
        assert self.spiller is not None
        messages = self._messages(instruction) if instruction.microbatch >= 0 else []
        self.spiller.carry_out(instruction, messages)

    def _messages(self, instruction: Instruction) -> list[torch.Tensor]:
        """Return what a stage keeps of other stages for a microbatch, and what it gets (L) or has made (U)."""
        end = 1 if instruction.op == Op.LOAD else 0
        in_flight = self.runners[instruction.stage].in_flight.get(self._key(instruction))
        tensors = [] if in_flight is None else list(in_flight.received.values())
        for (_, edge, *key), values in self._mail.items():
            if edge[end] == instruction.stage and tuple(key) == self._key(instruction):
                tensors += values.values()
        return tensors

    def settle(self) -> None:
        """Wait until the state of all stages can be read."""
        if self.spiller is not None:
            self.spiller.settle()


def _overlapping_backwards(row: Sequence[Instruction]) -> frozenset[Instruction]:
    """Return the backwards that complete the gradients of a minibatch, whose sum over the replicas may start in them.

    The replicas of several stages may be the same ranks, which start all sums in the order of their R. So no sum starts
    while an earlier R is still to come, as with a last minibatch of fewer microbatches.
    """
    last: dict[tuple[int, int], int] = {}
    overlapping, previous = set(), -1
    for index, i in enumerate(row):
        if i.op == Op.BACKWARD:
            last[i.stage, i.minibatch] = index
        elif i.op == Op.REDUCE:
            backward = last.get((i.stage, i.minibatch), -1)
            if backward > previous:
                overlapping.add(row[backward])
            previous = index
    return frozenset(overlapping)


def _shifted(turn: Turn, offset: int) -> Turn:
    """Return the same turn ``offset`` minibatches later. Each flush adds one weight version."""

    def later(i: Instruction) -> Instruction:
        version = i.weight_version + offset if i.weight_version >= 0 else -1
        return Instruction(i.op, i.stage, i.minibatch + offset, i.microbatch, version, i.peer)

    return Turn(later(turn.instruction), tuple(map(later, turn.posts)))
