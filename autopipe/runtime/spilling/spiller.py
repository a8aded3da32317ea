"""``Spiller``: moves the stages of one rank between host and device, as the L, O and U of its row say.

A copy begins with its instruction and overlaps with what is computed meanwhile. What needs the copy waits for it, in
``ready``.

==============================  =====================================  ==================================
what                            to the device                          to the host
==============================  =====================================  ==================================
weights                         L, unless a slab contains them still   U, if they were stepped
optimizer state, averages       O                                      U
gradients that wait for a step  L                                      U
messages of a microbatch        L of the microbatch                    U of the microbatch
==============================  =====================================  ==================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from autopipe.ir.schedule import Instruction, Op
from autopipe.runtime.spans import SpanRecorder
from autopipe.runtime.spilling.copies import Done, Lane, lane_of
from autopipe.runtime.spilling.messages import Messages
from autopipe.runtime.spilling.stage_memory import SpilledPart
from autopipe.runtime.spilling.token import DeviceToken
from autopipe.schedules.spilling.lanes import Slabs
from autopipe.schedules.spilling.spill import SLABS

_STEPS_NOT_COUNTED = 2


class Spiller:
    """The stages of one rank.

    Args:
        parts: by stage. Their weights are on the host.
        device: of the rank.
        optimizer_slabs: how many stages may have optimizer state on the device at a time, while copies run: 1 or 2.
        recorder: takes the times of copies.
        register: called with the host memory of messages.
        token: of the device, if other processes compute on it too. A stage computes with it, and copies without.

    """

    def __init__(
        self,
        parts: Mapping[int, SpilledPart],
        device: torch.device,
        *,
        optimizer_slabs: int = SLABS,
        recorder: SpanRecorder | None = None,
        register: Callable[[torch.Tensor], None] = lambda _: None,
        token: DeviceToken | None = None,
    ) -> None:
        self.parts = dict(parts)
        self._token = token
        self._device = device
        self.to_device: Lane = lane_of(device, recorder)
        self.to_host: Lane = lane_of(device, recorder)
        self._slabs = Slabs()
        self._weights: list[torch.Tensor] = []  # the slabs
        self._optimizer: list[torch.Tensor] = []
        self._num_optimizer_slabs = optimizer_slabs
        self._next_slab = 0  # for optimizer state
        # the copies from each slab to the host
        self._leaving: dict[int, Done] = {}
        self._optimizer_leaving: dict[int, Done] = {}
        self._optimizer_slab: dict[int, int] = {}  # stage -> slab
        self._loaded: dict[int, Done] = {}  # by stage
        self._optimizer_loaded: dict[int, Done] = {}
        self._stored: dict[int, Done] = {}
        self._gradients_leaving: Done | None = None
        self._gradients_loading: list[Done] = []
        self._agreed = -1  # the minibatch whose first step has begun
        self._messages = Messages(device, self.to_device, self.to_host, register)
        self._messages_loaded: dict[tuple[int, int, int], Done] = {}
        self._uncounted = _STEPS_NOT_COUNTED
        self._counted = [0, 0, 0]  # minibatches, bytes to the device, bytes to the host

    @contextlib.contextmanager
    def counted(self, num_minibatches: int) -> Iterator[None]:
        """Count the bytes that the body copies for some minibatches of training."""
        before = self.to_device.num_bytes, self.to_host.num_bytes
        yield
        if self._uncounted > 0:
            self._uncounted -= num_minibatches
            return
        self._counted[0] += num_minibatches
        self._counted[1] += self.to_device.num_bytes - before[0]
        self._counted[2] += self.to_host.num_bytes - before[1]

    def bytes_per_step(self) -> tuple[int, int] | None:
        """Return the bytes that a step copies to the device and to the host, without the first steps.

        These find nothing on the device, or no optimizer state yet. None: there were no others.
        """
        steps, to_device, to_host = self._counted
        return (to_device // steps, to_host // steps) if steps else None

    def carry_out(self, i: Instruction, messages: Sequence[torch.Tensor] = ()) -> None:
        """Carry out L, O or U, of a stage or of the messages of a microbatch."""
        if i.microbatch < 0:
            self._pause()
            {Op.LOAD: self.load, Op.LOAD_OPTIMIZER: self.load_optimizer, Op.UNLOAD: self.unload}[i.op](i)
        elif i.op == Op.UNLOAD:
            self._messages.unload(i, messages)
        elif (done := self._messages.load(i, messages)) is not None:
            self._messages_loaded[i.stage, i.minibatch, i.microbatch] = done

    def load(self, i: Instruction) -> None:
        """Carry out L: begin to bring the weights of a stage, and its gradients if they wait on the host."""
        part = self.parts[i.stage]
        if not self._weights:
            size = max(part.weights.flat.num_bytes for part in self.parts.values())
            self._weights = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(SLABS)]
        if part.weights.is_replaced:
            self._wait_for_store(i.stage)
            part.weights.take_replaced()
            self._slabs.forget(i.stage)
        if part.has_gradients:
            self._end_leaving()
        slab, cached = self._slabs.take(i.stage)
        copy = part.weights.go(self._weights[slab])
        pairs = [*([] if cached else [copy]), *part.gradients_there(self._device)]
        part.note_versions()
        if pairs:
            after = [done for done in (self._stored.get(i.stage), self._leaving.get(slab)) if done is not None]
            self._loaded[i.stage] = self.to_device.copy(i, pairs, after)
            if part.has_gradients:
                self._gradients_loading.append(self._loaded[i.stage])

    def load_optimizer(self, i: Instruction) -> None:
        """Carry out O: begin to bring the optimizer state of a stage. Before its first step, it has none."""
        part = self.parts[i.stage]
        if part.slots_are_new:
            self._wait_for_store(i.stage)
            part.take_slots()
        block = part.optimizer
        if block is None:
            return
        slab = self._slab_for_optimizer(block.flat.num_bytes)
        self._optimizer_slab[i.stage] = slab
        pairs = [block.go(self._optimizer[slab])]
        after = [done for done in (self._stored.get(i.stage), self._optimizer_leaving.get(slab)) if done is not None]
        self._optimizer_loaded[i.stage] = self.to_device.copy(i, pairs, after)

    def _slab_for_optimizer(self, size: int) -> int:
        if not self._optimizer or size > self._optimizer[0].numel():
            for done in self._optimizer_leaving.values():
                done.synchronize()
            self._optimizer.clear()
            blocks = [part.optimizer for part in self.parts.values() if part.optimizer is not None]
            largest = max(block.flat.num_bytes for block in blocks)
            for _ in range(self._num_optimizer_slabs):
                self._optimizer.append(torch.empty(largest, dtype=torch.uint8, device=self._device))
        self._next_slab = (self._next_slab + 1) % self._num_optimizer_slabs
        return self._next_slab

    def ready(self, i: Instruction) -> None:
        """Wait until what an instruction needs is on the device, before it computes or steps."""
        if i.op == Op.STEP and i.minibatch != self._agreed:
            self._agreed = i.minibatch
            self._wait_for_gradients()
        waits = [self._loaded.pop(i.stage, None), self._messages_loaded.pop((i.stage, i.minibatch, i.microbatch), None)]
        if i.op == Op.STEP:
            # a step changes in place what may still be on its way to the host
            waits += [self._optimizer_loaded.pop(i.stage, None), self._stored.get(i.stage)]
        if self._token is not None:
            self._take_turn([done for done in waits if done is not None and not done.has_ended()])
        for done in waits:
            if done is not None:
                done.wait()

    def _take_turn(self, copies: Sequence[Done]) -> None:
        """Wait for copies, then until no other process computes on the device."""
        assert self._token is not None
        if copies:
            self._pause()
            for done in copies:
                done.synchronize()
        self._token.take()

    def _pause(self) -> None:
        """Let another process compute on the device, until the next stage begins."""
        if self._token is not None and self._token.is_taken:
            if self._device.type == "cuda":  # what was launched belongs to this turn
                torch.cuda.current_stream(self._device).synchronize()
            self._token.give()

    def stepped(self, stage: int) -> None:
        """Note that the weights on the device have changed."""
        self._slabs.change(stage)

    def unload(self, i: Instruction) -> None:
        """Carry out U: begin to write to the host what has changed. The memory of the device may be used again."""
        part = self.parts[i.stage]
        for loaded in (self._loaded.pop(i.stage, None), self._optimizer_loaded.pop(i.stage, None)):
            if loaded is not None:
                loaded.wait()
        if part.changed:
            self._slabs.change(i.stage)
        slab, changed = self._slabs.give_back(i.stage)
        if weights := part.weights_home(self._weights[slab], changed=changed):  # first: the next L waits for the slab
            self._stored[i.stage] = self._leaving[slab] = self.to_host.copy(i, weights, [])
        optimizer_slab = self._optimizer_slab.pop(i.stage, None)
        if optimizer_slab is not None:
            done = self.to_host.copy(i, part.slots_home(self._optimizer[optimizer_slab]), [])
            self._stored[i.stage] = self._optimizer_leaving[optimizer_slab] = done
        if part.has_gradients:
            self._end_leaving()
        if gradients := part.gradients_home():
            self._stored[i.stage] = self._gradients_leaving = self.to_host.copy(i, gradients, [])
        if part.slots_are_new:  # the optimizer has made them in this step
            self._wait_for_store(i.stage)
            part.take_slots()

    def _wait_for_gradients(self) -> None:
        """Wait for gradients that are on their way: the first step of a minibatch may read those of all stages."""
        self._end_leaving()
        for done in self._gradients_loading:
            done.wait()
        self._gradients_loading.clear()

    def _end_leaving(self) -> None:
        """Wait for gradients on their way to the host, so that those of two stages are on the device at most."""
        if self._gradients_leaving is not None:
            self._gradients_leaving.synchronize()
            self._gradients_leaving = None

    def _wait_for_store(self, stage: int) -> None:
        if stage in self._stored:
            self._stored[stage].synchronize()

    def settle(self) -> None:
        """Wait until the host has the state of all stages that are not on the device."""
        for done in self._stored.values():
            done.synchronize()

    def gradient_of(self, stage: int, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return a gradient of a stage on the rank's device, wherever it is."""
        self._wait_for_store(stage)
        return None if parameter.grad is None else parameter.grad.to(self._device)

    def assign(self, stage: int, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Give a parameter of a stage a value, wherever it is."""
        if stage in self._loaded:
            self._loaded[stage].synchronize()
        self._wait_for_store(stage)
        parameter.data.copy_(value)
        if self._slabs.is_taken(stage):
            self._slabs.change(stage)
        self._slabs.forget(stage)

    def close(self) -> None:
        """End the copies, and the turn."""
        self.to_device.close()
        self.to_host.close()
        if self._token is not None:
            self._token.close()
