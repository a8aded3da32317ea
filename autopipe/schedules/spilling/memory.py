"""The memory of stages that take turns on a device, counted instruction by instruction.

========================  ==========================================================================================
bytes                     on the device
========================  ==========================================================================================
slabs, buffers            always; slabs contain the weights and the optimizer state
casts of the weights      from the first F or B behind L to U
gradients of the weights  from the first B of a minibatch to S; if they are given back before it, until the next
                          gradients are given back or brought, and from the next L on
kept by a microbatch      from F to the end of its B
working memory            during F, B and S
message                   from the F or B that makes it to the end of the B that needs it last; if messages are on the
                          host, from L of the microbatch to the next U of one
========================  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopipe.ir.schedule import COMPUTE, Instruction, Op, Schedule
from autopipe.schedules.memory import Edge, MessageBytes


@dataclass(frozen=True, slots=True)
class SpilledBytes:
    """Bytes of one stage on the device."""

    casts: int
    gradients: int
    kept: int  # per microbatch, without messages
    working: int  # of a forward and a backward
    stepping: int  # of a step


def spilled_peaks(
    schedule: Schedule, base: int, sizes: Sequence[SpilledBytes], messages: MessageBytes
) -> tuple[int, ...]:
    """Return, for every stage, the most bytes on the device while its instructions run. It includes other stages'.

    ``schedule``: of one rank, without sends and receives. ``base``: what is always there.
    """
    usage = _Usage(schedule, base, sizes, messages)
    peaks = [base] * schedule.request.num_stages
    for instruction in schedule.rows[0]:
        usage.begin(instruction)
        peaks[instruction.stage] = max(peaks[instruction.stage], usage.now)
        usage.end(instruction)
    return tuple(peaks)


class _Usage:
    """The bytes on the device, ``now``. They peak between ``begin`` and ``end`` of an instruction."""

    def __init__(self, schedule: Schedule, base: int, sizes: Sequence[SpilledBytes], messages: MessageBytes) -> None:
        count = schedule.request.num_stages
        self.now = base
        self._sizes = sizes
        self._on_host = any(i.op == Op.LOAD and i.microbatch >= 0 for i in schedule.rows[0])
        self._activations_in = _sums(messages.forward, 1, count)
        self._activations_out = _sums(messages.forward, 0, count)
        self._gradients_in = _sums(messages.backward, 1, count)
        self._gradients_out = _sums(messages.backward, 0, count)
        self._forward_done: set[tuple[int, int, int]] = set()
        self._backward_done: set[tuple[int, int, int]] = set()
        self._with_casts: set[int] = set()
        self._gradients: dict[int, int] = {}
        self._on_host_gradients: set[int] = set()
        self._leaving = 0  # gradients on their way to the host
        self._messages_leaving = 0

    def begin(self, i: Instruction) -> None:
        """Add the bytes that an instruction allocates."""
        size, s = self._sizes[i.stage], i.stage
        key = s, i.minibatch, i.microbatch
        if i.op == Op.LOAD and i.microbatch < 0:
            if s in self._on_host_gradients:
                self._on_host_gradients.remove(s)
                self._end_leaving()
                self._begin_gradients(s)
        elif i.op == Op.LOAD:
            self.now += self._activations_in[s] + (self._gradients_in[s] if key in self._forward_done else 0)
        elif i.op in COMPUTE:
            if s not in self._with_casts:
                self._with_casts.add(s)
                self.now += size.casts
            if i.op == Op.FORWARD:
                self.now += size.kept + self._activations_out[s]
            else:
                self._begin_gradients(s)
                self.now += self._gradients_out[s]
            self.now += size.working
        elif i.op == Op.STEP:
            self.now += size.stepping
        elif i.op == Op.UNLOAD and i.microbatch >= 0:
            self.now -= self._messages_leaving
            self._messages_leaving = 0
        elif i.op == Op.UNLOAD and s in self._gradients:
            self._end_leaving()

    def _end_leaving(self) -> None:
        self.now -= self._leaving
        self._leaving = 0

    def _begin_gradients(self, stage: int) -> None:
        if stage not in self._gradients:
            self._gradients[stage] = self._sizes[stage].gradients
            self.now += self._gradients[stage]

    def end(self, i: Instruction) -> None:
        """Subtract the bytes that an instruction frees."""
        size, s = self._sizes[i.stage], i.stage
        key = s, i.minibatch, i.microbatch
        if i.op == Op.FORWARD:
            self._forward_done.add(key)
            self.now -= size.working
        elif i.op in COMPUTE:
            self._backward_done.add(key)
            self.now -= size.working + size.kept
            if not self._on_host:  # the activations and gradients that it received
                self.now -= self._activations_in[s] + self._gradients_in[s]
        elif i.op == Op.STEP:
            self.now -= size.stepping + self._gradients.pop(s, 0)
        elif i.op == Op.UNLOAD and i.microbatch < 0:
            if s in self._with_casts:
                self._with_casts.remove(s)
                self.now -= size.casts
            if s in self._gradients:
                self._leaving = self._gradients.pop(s)
                self._on_host_gradients.add(s)
        elif i.op == Op.UNLOAD:
            backward = key in self._backward_done
            sent = self._gradients_in[s] + self._gradients_out[s] if backward else self._activations_out[s]
            self._messages_leaving = self._activations_in[s] + sent


def _sums(edges: Mapping[Edge, int], end: int, count: int) -> list[int]:
    sums = [0] * count
    for edge, amount in edges.items():
        sums[edge[end]] += amount
    return sums
