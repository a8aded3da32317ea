"""The bytes and seconds of a plan whose stages take turns on their device.

::

    base = 2 P + k S + buffers     P the weights of the largest stage, S its optimizer state, k slabs for that

``schedules.spilling.memory`` counts the rest, instruction by instruction. A copy between host and device takes its
bytes divided by the host bandwidth of the device; ``schedules.spilling.lanes`` simulates them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from autopipe.ir.cuts import Cuts
from autopipe.ir.messages import Edge, MessagePlan, message_bytes
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.ir.schedule import COPIES
from autopipe.planning.cost.atoms import Atoms
from autopipe.planning.cost.backward import backward_bytes
from autopipe.planning.cost.byte_sums import ByteSums
from autopipe.planning.spilled.terms import SpilledSums, SpilledTerms, stepping_bytes
from autopipe.schedules import MessageBytes, make
from autopipe.schedules.costs import SpillCosts
from autopipe.schedules.spilling.lanes import Lanes
from autopipe.schedules.spilling.memory import SpilledBytes, spilled_peaks
from autopipe.schedules.spilling.spill import SLABS
from autopipe.schedules.spilling.spilled import LATE, OPTIMIZER_SLABS


def spilled_terms(plan: Plan, profile: Profile) -> list[SpilledTerms]:
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


def _sizes(plan: Plan, profile: Profile, atoms: Atoms, terms: Sequence[SpilledTerms]) -> list[SpilledBytes]:
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
