"""``Executor``: runs the program of one rank, with one method per operation.

The rank gets its row of a lowered schedule; nothing here knows a schedule by name. Receives are posted ahead of their
turn, so that the transfer overlaps with computation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopipe.errors import InternalError, RunError
from autopipe.ir.messages import ACTIVATION, GRADIENT, Edge
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import COMPUTE, COPIES, Instruction, Op, ScheduleSpec
from autopipe.runtime.batches.on_device import on_host
from autopipe.runtime.batches.recording import Microbatch, Recording
from autopipe.runtime.events import Reporter
from autopipe.runtime.first_kernels import FirstKernels
from autopipe.runtime.footprint import Footprint
from autopipe.runtime.program import Step, overlapping_backwards
from autopipe.runtime.spans import SpanRecorder
from autopipe.runtime.spilling.memory_ledger import DeviceBooks
from autopipe.runtime.spilling.spiller import Spiller
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.step.stepper import Stepper
from autopipe.runtime.transport.base import Pending, Transport
from autopipe.schedules import Turn
from autopipe.strides import Layout

# the rows of windows whose replicas differ take turns; the shapes of batches may never repeat
_KEPT_PROGRAMS, _KEPT_LAYOUTS = 8, 4096


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
    # tells when kernels may be loaded; None on a CPU
    kernels: FirstKernels | None = None
    # the tensors of a message, from arrival or production until they are read or sent
    _mail: dict[tuple[str, Edge, int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    _posted: dict[tuple[str, Edge, int, int], list[Pending]] = field(default_factory=dict)
    _minibatches: Mapping[int, Sequence[Microbatch]] = field(default_factory=dict)
    _training: bool = True
    # the step that runs, and how many minibatches later than in its row
    _running: tuple[Step, int] | None = None
    # the newest rows, each with its program for complete minibatches; by the identity of the row
    _programs: dict[int, tuple[Sequence[Turn], list[Step]]] = field(default_factory=dict)
    # the layouts of the values of a message: by kind, edge, recording and sizes
    _known_layouts: dict[tuple[Any, ...], tuple[Layout, ...]] = field(default_factory=dict)

    @property
    def current(self) -> Instruction | None:
        """The instruction that runs, or has failed."""
        return None if self._running is None else self._running[0].at(self._running[1])

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

        Raises: InternalError for an instruction that the runtime does not implement.
        """
        self._minibatches, self._training = minibatches, training
        if self.kernels is not None:
            self.transport.through_host = self.kernels.may_load(minibatches, training=training)
        reporter = self.reporter
        plain = self.recorder is None and self.footprint is None and self.spiller is None
        with contextlib.nullcontext() if self.footprint is None else self.footprint.owners:
            for step in self._program(row, offset):
                for posted in step.posts:
                    if self.footprint is None:
                        self._post(posted, offset)
                    else:
                        with self._measured(posted.at(offset)):
                            self._post(posted, offset)
                self._running = step, offset
                reporter.at(step.text(offset), waiting=step.waits)
                if step.run is None:
                    raise InternalError(f"the runtime does not implement {step.op!r} ({step.instruction})")
                if plain:
                    step.run(step, offset)
                else:
                    self._run_observed(step, offset)
        self._running = None

    def _run_observed(self, step: Step, offset: int) -> None:
        """Run a step that is timed, measured, or may have to wait for its stage to be on the device."""
        instruction = step.at(offset)
        assert step.run is not None
        copies = step.op in COPIES  # the lanes time these
        timed = self.recorder.during(instruction) if self.recorder and not copies else contextlib.nullcontext()
        if self.spiller is not None and (step.op in COMPUTE or step.op == Op.STEP):
            self.spiller.ready(instruction)
        with timed, self._measured(instruction):
            step.run(step, offset)

    def _program(self, row: Sequence[Turn], offset: int) -> list[Step]:
        """Return the steps of a row, without those of microbatches that a ragged minibatch does not have."""
        counts = {t: len(parts) for t, parts in self._minibatches.items()}
        if min(counts.values(), default=0) < self.request.num_microbatches:

            def is_present(i: Instruction) -> bool:
                return i.microbatch < counts[i.minibatch + offset]

            posts = [tuple(filter(is_present, turn.posts)) for turn in row]
            # a receive that is posted ahead of an instruction that is left out is posted ahead of the next one
            kept: list[Turn] = []
            waiting: tuple[Instruction, ...] = ()
            for turn, present in zip(row, posts, strict=True):
                waiting += present
                if is_present(turn.instruction):
                    kept.append(Turn(turn.instruction, waiting))
                    waiting = ()
            return self._steps(kept)
        known = self._programs.get(id(row))
        if known is None:
            while len(self._programs) >= _KEPT_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            known = self._programs[id(row)] = row, self._steps(row)
        return known[1]

    def _steps(self, row: Sequence[Turn]) -> list[Step]:
        handlers: dict[Op, Callable[[Step, int], None]] = {
            Op.FORWARD: self._forward, Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUTS: self._backward_inputs, Op.BACKWARD_WEIGHTS: self._backward_weights,
            Op.SEND_FORWARD: self._send, Op.SEND_BACKWARD: self._send,
            Op.RECEIVE_FORWARD: self._receive, Op.RECEIVE_BACKWARD: self._receive,
            Op.REDUCE: self._reduce, Op.STEP: self._step,
            Op.LOAD: self._load, Op.LOAD_OPTIMIZER: self._load, Op.UNLOAD: self._load,
        }  # fmt: skip
        overlapping = overlapping_backwards([turn.instruction for turn in row])
        return [Step.of(turn, self.request, self.transport.rank, handlers, overlapping) for turn in row]

    def _measured(self, instruction: Instruction) -> contextlib.AbstractContextManager[None]:
        """Return the context in which an instruction runs, which attributes its memory to its stage."""
        if self.footprint is None:
            return contextlib.nullcontext()
        leaves: Mapping[str, torch.Tensor] = {}
        if instruction.op == Op.FORWARD:
            leaves = on_host(self._minibatches[instruction.minibatch][instruction.microbatch].leaves)
        names = self.runners[instruction.stage].stage.INPUTS
        return self.footprint.during(instruction, [leaves[name] for name in names if name in leaves])

    def _microbatch(self, step: Step, offset: int) -> Microbatch:
        return self._minibatches[step.minibatch + offset][step.microbatch]

    def _post(self, step: Step, offset: int) -> None:
        assert step.channel is not None
        _, layouts = self._message(step, self._microbatch(step, offset))
        key = step.kind, step.edge, step.minibatch + offset, step.microbatch
        self._posted[key] = self.transport.receive_message(step.channel, layouts)

    def _message(self, step: Step, microbatch: Microbatch) -> tuple[tuple[str, ...], tuple[Layout, ...]]:
        """Return the values of a message and their layouts. A gradient is sent in the memory order of its value."""
        recording, sizes = microbatch.recording, microbatch.sizes
        values = _edges(step.kind, recording).get(step.edge, ())
        key = step.kind, step.edge, recording.name, *sizes.values()
        layouts = self._known_layouts.get(key)
        if layouts is None:
            if len(self._known_layouts) >= _KEPT_LAYOUTS:
                self._known_layouts.clear()
            specs = [recording.specs[value] for value in values]
            layouts = tuple(Layout(s.concrete(sizes), getattr(torch, s.dtype), s.order) for s in specs)
            self._known_layouts[key] = layouts
        return values, layouts

    def _receive(self, step: Step, offset: int) -> None:
        key = step.kind, step.edge, step.minibatch + offset, step.microbatch
        tensors = [pending.wait() for pending in self._posted.pop(key)]
        values = _edges(step.kind, self._microbatch(step, offset).recording).get(step.edge, ())
        self._mail[key] = dict(zip(values, tensors, strict=True))

    def _deliver(self, kind: str, step: Step, offset: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep the outputs of an instruction for a send, or for a stage on this rank."""
        minibatch, stage = step.minibatch + offset, step.stage
        for edge, values in _edges(kind, self._microbatch(step, offset).recording).items():
            if edge[0] == stage:
                # each reader gets its own tensor object, because each collects its own gradient
                self._mail[kind, edge, minibatch, step.microbatch] = {
                    value: tensors[value].detach() for value in values
                }

    def _send(self, step: Step, offset: int) -> None:
        assert step.channel is not None
        # empty if this microbatch sends nothing over the edge
        tensors = self._mail.pop((step.kind, step.edge, step.minibatch + offset, step.microbatch), {})
        if not tensors:
            return
        _, layouts = self._message(step, self._microbatch(step, offset))
        for (value, tensor), layout in zip(tensors.items(), layouts, strict=True):
            if tensor.shape != layout.shape or tensor.dtype != layout.dtype:
                raise RunError(
                    f"{value} must be {str(layout.dtype).removeprefix('torch.')}{list(layout.shape)} here, and is "
                    f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}",
                    where=f"stage {step.stage}, before it is sent to stage {step.edge[1]}",
                    remedy="the shape depends on more than the shapes of the batch: let it follow from them alone, or "
                    "train in one stage (--gpus 1)",
                )
        self.transport.send_message(step.channel, list(tensors.values()), layouts)

    def _take(self, kind: str, step: Step, offset: int) -> dict[str, torch.Tensor]:
        """Return the tensors from other stages, in the order in which autograd would have added them."""
        minibatch, stage = step.minibatch + offset, step.stage
        tensors: dict[str, torch.Tensor] = {}
        for edge in _edges(kind, self._microbatch(step, offset).recording):
            if edge[1] == stage:
                tensors.update(self._mail.pop((kind, edge, minibatch, step.microbatch)))
        return tensors

    def _forward(self, step: Step, offset: int) -> None:
        runner = self.runners[step.stage]
        microbatch = self._microbatch(step, offset)
        name = microbatch.recording.name
        inputs = [microbatch.leaves[entry] for entry in runner.variants[name].code.INPUTS]
        received = self._take(ACTIVATION, step, offset)
        key = step.minibatch + offset, step.microbatch
        if self._training:
            runner.versions.use(step.version(offset))
            outputs = runner.forward(key, inputs, received, microbatch.factor, name)
        else:
            outputs = runner.evaluate(key, inputs, received, microbatch.factor, name)
        self._deliver(ACTIVATION, step, offset, outputs)

    def _backward(self, step: Step, offset: int) -> None:
        runner = self.runners[step.stage]
        runner.versions.use(step.version(offset))
        key = step.minibatch + offset, step.microbatch
        arrived = self._take(GRADIENT, step, offset)
        if step.overlapping:
            with self.stepper.overlapping(step.stage):
                gradients = runner.backward(key, arrived)
        else:
            gradients = runner.backward(key, arrived)
        self._deliver(GRADIENT, step, offset, gradients)

    def _backward_inputs(self, step: Step, offset: int) -> None:
        runner = self.runners[step.stage]
        runner.versions.use(step.version(offset))
        key = step.minibatch + offset, step.microbatch
        gradients = runner.backward_inputs(key, self._take(GRADIENT, step, offset))
        self._deliver(GRADIENT, step, offset, gradients)

    def _backward_weights(self, step: Step, offset: int) -> None:
        self.runners[step.stage].backward_weights((step.minibatch + offset, step.microbatch))

    def _reduce(self, step: Step, offset: int) -> None:
        self.stepper.reduce(step.stage, step.minibatch + offset)

    def _step(self, step: Step, offset: int) -> None:
        self.stepper.step(step.stage, step.minibatch + offset)
        if self.spiller is not None:
            self.spiller.stepped(step.stage)

    def _load(self, step: Step, offset: int) -> None:
        assert self.spiller is not None
        instruction = step.at(offset)
        messages = self._messages(instruction) if instruction.microbatch >= 0 else []
        self.spiller.carry_out(instruction, messages)

    def _messages(self, instruction: Instruction) -> list[torch.Tensor]:
        """Return what a stage keeps of other stages for a microbatch, and what it gets (L) or has made (U)."""
        end = 1 if instruction.op == Op.LOAD else 0
        of = instruction.minibatch, instruction.microbatch
        in_flight = self.runners[instruction.stage].in_flight.get(of)
        tensors = [] if in_flight is None else list(in_flight.received.values())
        for (_, edge, *key), values in self._mail.items():
            if edge[end] == instruction.stage and tuple(key) == of:
                tensors += values.values()
        return tensors

    def settle(self) -> None:
        """Wait until the state of all stages can be read."""
        if self.spiller is not None:
            self.spiller.settle()


def _edges(kind: str, recording: Recording) -> Mapping[Edge, tuple[str, ...]]:
    """Return the values of each message of a microbatch, by edge."""
    message_plan = recording.message_plan
    return message_plan.forward if kind == ACTIVATION else message_plan.backward
