"""A profile with the times of a device that is not here, from the device's datasheet.

What each node computes and moves was counted when the profile was taken, on whatever device. The roofline model
(Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009) turns it into seconds: a matrix operation takes as long as
its arithmetic or its memory traffic, whichever is longer; every other operation takes as long as its traffic::

    seconds = max(flops / (COMPUTE_EFFICIENCY * peak), matrix_bytes / bandwidth) + other_bytes / bandwidth
    optimizer seconds, per byte of parameters = (3 + 2 * state) / bandwidth

A backward also adds the gradient of each microbatch to the sum: it reads both and writes one. An optimizer step reads
the parameter and its gradient, reads and writes its state, and writes the parameter. Kernel launches are not counted:
small layers at small microbatches take longer than this.
"""

from __future__ import annotations

import dataclasses

from autopipe.errors import PlanError
from autopipe.ir.graph import Graph
from autopipe.ir.profile import Device, Measurement, NodeCost, NodeWork, PassWork, Profile
from autopipe.planning.cost.datasheets import Datasheet
from autopipe.units import in_bandwidth

COMPUTE_EFFICIENCY = 0.6
"""The part of the peak rate that matrix products, convolutions and attention reach: an assumption, not a measurement.

What they read and write is charged at the full bandwidth. Of a large transformer as a whole, about 40 % of the peak is
left, which is what such models are reported to train at (Llama 3, arXiv:2407.21783, table 4: 38 to 43 % on H100)."""


def on_datasheet(profile: Profile, sheet: Datasheet, precision: str) -> Profile:
    """Return the profile as if it had been taken on the device of a datasheet. Bytes stay as they were counted.

    Raises: PlanError where the profile holds no counts, or the device does not have the precision.
    """
    peak = COMPUTE_EFFICIENCY * sheet.peak(precision)
    if any(not measurement.work for measurement in profile.measurements):
        raise PlanError(
            f"the profile of {profile.graph.name} does not say what its nodes compute and move: an earlier version of "
            "autopipe took it",
            remedy="profile the model again: autopipe profile TARGET",
        )
    return dataclasses.replace(
        profile,
        device=Device("gpu", sheet.name, sheet.memory_bytes),
        measurements=tuple(_priced(m, profile.graph, peak, sheet.memory_bandwidth) for m in profile.measurements),
        optimizer_seconds_per_byte=(3 + 2 * profile.optimizer_bytes_per_byte) / sheet.memory_bandwidth,
    )


def describe(sheet: Datasheet, precision: str, profiled: str) -> str:
    """Return, in a sentence, how the times of a plan for this device were estimated."""
    return (
        f"estimate, nothing was measured on such a device: operations and bytes counted on {profiled}, at "
        f"{COMPUTE_EFFICIENCY:.0%} of {sheet.peak(precision) / 1e12:.4g} TFLOP/s ({precision}) and "
        f"{in_bandwidth(sheet.memory_bandwidth, 4)} of memory bandwidth ({sheet.source}); kernel launches are not "
        "counted"
    )


def _priced(measurement: Measurement, graph: Graph, peak: float, bandwidth: float) -> Measurement:
    costs: dict[str, NodeCost] = {}
    for node in graph.nodes:
        work = measurement.work.get(node.name, NodeWork())
        trained = [graph.parameters[name] for name in node.parameters if graph.parameters[name].requires_grad]
        accumulated = 3 * sum(spec.num_bytes({}) for spec in trained)
        costs[node.name] = dataclasses.replace(
            measurement.costs[node.name],
            forward_seconds=_seconds(work.forward, peak, bandwidth),
            backward_seconds=_seconds(work.backward, peak, bandwidth) + accumulated / bandwidth,
        )
    return dataclasses.replace(measurement, costs=costs, spread=0.0)


def _seconds(work: PassWork, peak: float, bandwidth: float) -> float:
    return max(work.flops / peak, work.matrix_bytes / bandwidth) + work.other_bytes / bandwidth
