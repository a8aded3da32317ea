"""The bytes and seconds of a plan whose stages take turns on their device.

::

    base = 2 P + k S + buffers     P the weights of the largest stage, S its optimizer state, k slabs for that

``schedules.spilling.memory`` counts the rest, instruction by instruction. A copy between host and device takes its
bytes divided by the host bandwidth of the device; ``schedules.spilling.lanes`` simulates them.

Slabs contain tensors that are aligned to 64 bytes, so many small ones take more there than elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopipe.ir.cuts import Cuts
from autopipe.ir.messages import Edge, MessagePlan, message_bytes
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.ir.schedule import COPIES
from autopipe.planning.cost.atoms import Atoms
from autopipe.planning.cost.backward import backward_bytes
from autopipe.planning.cost.byte_sums import ByteSums, users_of_state
from autopipe.planning.cost.pair_sum import Array, PairSum
from autopipe.schedules import MessageBytes, make
from autopipe.schedules.costs import SpillCosts
from autopipe.schedules.spilling.lanes import Lanes
from autopipe.schedules.spilling.memory import SpilledBytes, spilled_peaks
from autopipe.schedules.spilling.spill import LATE, OPTIMIZER_SLABS, SLABS

_ALIGNMENT = 64
"""Of the tensors of a slab, in bytes (``runtime.spilling.flat_buffers``)."""


def spilled_terms(plan: Plan, profile: Profile) -> list[_SpilledTerms]:
    """Return the terms of the stages of a plan."""
    atoms = Atoms(profile.graph, Cuts(profile.graph), profile.at(plan.microbatch_size))
    return SpilledSums(atoms, profile.optimizer_bytes_per_byte).along([stage.start for stage in plan.stages])


def peaks_of(plan: Plan, profile: Profile) -> tuple[int, ...]:
    """Return the most bytes on the device while each stage is active.

    It is the larger one of the two ways to step, early and late: an option of the run decides which.
    """
    atoms = Atoms(profile.graph, Cuts(profile.graph), profile.at(plan.microbatch_size))
    sums = SpilledSums(atoms, profile.optimizer_bytes_per_byte)
    starts = [stage.start for stage in plan.stages]
    terms = sums.along(starts)
    slabs = plan.schedule_options.get(OPTIMIZER_SLABS.name, OPTIMIZER_SLABS.default)
    base = SLABS * max(t.slab for t in terms) + slabs * max(t.optimizer for t in terms) + sums.buffers
    message_plan = MessagePlan.of(plan, profile.graph)
    sent = message_bytes(plan, profile.graph, message_plan)
    messages = MessageBytes({e: sent[e] for e in message_plan.forward}, {e: sent[e] for e in message_plan.backward})
    sizes = _sizes(plan, profile, atoms, terms)
    peaks = []
    for late in (0, 1):
        request = plan.request()
        request = dataclasses.replace(request, options={**request.options, LATE.name: late})
        peaks.append(spilled_peaks(make(plan.schedule, request), base, sizes, messages))
    return tuple(max(pair) for pair in zip(*peaks, strict=True))


def _sizes(plan: Plan, profile: Profile, atoms: Atoms, terms: Sequence[_SpilledTerms]) -> list[SpilledBytes]:
    starts = [stage.start for stage in plan.stages]
    every = ByteSums(atoms, profile.optimizer_bytes_per_byte).along(starts)
    workspaces = backward_bytes(atoms, starts, [() for _ in starts], {})
    return [
        SpilledBytes(
            casts=own.casts,
            gradients=of_stage.gradients,
            kept=own.inputs + backward.replayed,
            working=of_stage.saved + max(backward.whole, backward.first - of_stage.gradients),
            stepping=math.ceil(stepping_bytes(of_stage.gradients, of_stage.largest, profile.optimizer_bytes_per_byte)),
        )
        for own, of_stage, backward in zip(terms, every, workspaces, strict=True)
    ]


def copied_bytes(plan: Plan, profile: Profile, *, late: bool = False) -> tuple[int, int]:
    """Return the bytes that one minibatch copies in the long run: to the device, to the host."""
    to_device = to_host = 0
    for before, count in ((-1, 2), (1, 3)):
        there, back = _copied(plan, profile, count, late=late)
        to_device, to_host = to_device + before * there, to_host + before * back
    return to_device, to_host


def _copied(plan: Plan, profile: Profile, count: int, *, late: bool) -> tuple[int, int]:
    request = plan.request(count)
    schedule = make(plan.schedule, dataclasses.replace(request, options={**request.options, LATE.name: int(late)}))
    lanes = Lanes(spill_costs(plan, profile, 1.0))
    for i in schedule.rows[0]:
        if i.op in COPIES:
            lanes.copy(i, 0.0)
        else:
            lanes.ready(i, 0.0)
    to_device, to_host = lanes.busy
    return round(to_device), round(to_host)


def spill_costs(plan: Plan, profile: Profile, bandwidth: float, begin_seconds: float = 0.0) -> tuple[SpillCosts, ...]:
    """Return the seconds of the copies of each stage.

    ``bandwidth``: bytes per second, in each direction. ``begin_seconds``: of the rank's time, for each copy.
    """
    message_plan = MessagePlan.of(plan, profile.graph)
    sent = message_bytes(plan, profile.graph, message_plan)
    trained = {name for name, spec in profile.graph.parameters.items() if spec.requires_grad}

    def of_stage(edges: Mapping[Edge, object], end: int, stage: int) -> float:
        return sum(sent[edge] for edge in edges if edge[end] == stage) / bandwidth

    costs = []
    for stage, terms in zip(plan.stages, spilled_terms(plan, profile), strict=True):
        gradients = sum(profile.graph.parameters[name].num_bytes({}) for name in trained & {*stage.parameters})
        costs.append(
            SpillCosts(
                weights=terms.slab / bandwidth,
                optimizer=terms.optimizer / bandwidth,
                gradients=gradients / bandwidth,
                activations_in=of_stage(message_plan.forward, 1, stage.index),
                activations_out=of_stage(message_plan.forward, 0, stage.index),
                gradients_in=of_stage(message_plan.backward, 1, stage.index),
                gradients_out=of_stage(message_plan.backward, 0, stage.index),
                begin=begin_seconds,
            )
        )
    return tuple(costs)


@dataclass(frozen=True, slots=True)
class _SpilledTerms:
    """The bytes of one stage."""

    slab: int  # its weights, in a slab
    optimizer: int  # its optimizer state, in a slab
    casts: int  # the 16-bit casts of its weights
    inputs: int  # per microbatch: batch tensors and input-only results, kept for the backward


class SpilledSums:
    """The contributions of a graph to ``_SpilledTerms``, for every pair of cuts or the stages of one plan."""

    def __init__(self, atoms: Atoms, optimizer_bytes_per_byte: float) -> None:
        self._atoms, self._per_byte = atoms, optimizer_bytes_per_byte
        graph, users, n = atoms.graph, users_of_state(atoms), atoms.count
        self._slab, self._stepped, self._casts, self._inputs = PairSum(n), PairSum(n), PairSum(n), PairSum(n)
        for name, spec in graph.parameters.items():
            size = -(-spec.num_bytes(atoms.sizes) // _ALIGNMENT) * _ALIGNMENT
            self._slab.distinct(users[name], size)
            self._casts.distinct(users[name], atoms.casts.get(name, 0))
            if spec.requires_grad:
                self._stepped.atom(min(users[name]), size)
        for entry in graph.inputs:
            self._inputs.distinct(atoms.reads.get(entry.name, ()), atoms.input_bytes[entry.name])
        for node in atoms.copied:
            self._inputs.distinct(atoms.reads[node.name], atoms.num_bytes(node.name))
        self.buffers = sum(spec.num_bytes(atoms.sizes) for spec in graph.buffers.values())
        """Bytes of all buffers of the model, which remain on the device."""

    def slabs(self) -> Array:
        """Return the bytes of the weights of every pair of cuts."""
        return self._slab.table()

    def optimizer(self) -> Array:
        """Return the bytes of the optimizer state of every pair of cuts."""
        return np.ceil(self._per_byte * self._stepped.table())

    def casts(self) -> Array:
        """Return the bytes of the casts of every pair of cuts."""
        return self._casts.table()

    def along(self, starts: Sequence[int]) -> list[_SpilledTerms]:
        """Return the terms of the stages of a plan that start at these node positions."""
        atom_at = {position: atom for atom, position in enumerate(self._atoms.edges)}
        edges = [*(atom_at[start] for start in starts), self._atoms.count]
        columns = (term.along(edges).tolist() for term in (self._slab, self._stepped, self._casts, self._inputs))
        return [
            _SpilledTerms(slab, math.ceil(self._per_byte * stepped), casts, inputs)
            for slab, stepped, casts, inputs in zip(*columns, strict=True)
        ]


def stepping_bytes(gradients: Any, largest: Any, optimizer_bytes_per_byte: float) -> Any:
    """Return the bytes of a step besides weights, gradients and state, of one stage or of all pairs of cuts.

    Optimizers step either all parameters at once, with a temporary tensor of each, or one after the other, with two of
    the largest. ``largest``: the optimizer state of the largest parameter.
    """
    one = largest / optimizer_bytes_per_byte if optimizer_bytes_per_byte else largest
    return np.maximum(gradients, 2 * one)
