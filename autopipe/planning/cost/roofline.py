"""Estimates the times of a profile on another device from the device's datasheet.

A profile contains the operations and bytes of each node, which do not depend on the device. The roofline model
(Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009) converts them to seconds. A matrix operation takes as long
as its arithmetic or its memory traffic, whichever is longer; every other operation takes as long as its traffic::

    seconds = max(flops / (COMPUTE_EFFICIENCY * peak), matrix_bytes / bandwidth) + other_bytes / bandwidth
    optimizer seconds, per byte of parameters = (3 + 2 * state) / bandwidth

A backward also adds the gradient of each microbatch to the sum: it reads two tensors and writes one. An optimizer step
reads the parameter and its gradient, reads and writes its state, and writes the parameter. Kernel launches are not
included, so that small layers at small microbatches take longer than the estimate.
"""

from __future__ import annotations

import dataclasses

from autopipe.errors import PlanError
from autopipe.ir.graph import Graph
from autopipe.ir.profile import Device, Measurement, NodeCost, NodeWork, PassWork, Profile
from autopipe.planning.cost.datasheets import Datasheet
from autopipe.units import in_bandwidth

COMPUTE_EFFICIENCY = 0.6
"""The fraction of the peak rate that matrix products, convolutions and attention reach: an assumption.

Their reads and writes are charged at the full bandwidth. A large transformer then reaches about 40 % of the peak, as
is reported for training such models (Llama 3, arXiv:2407.21783, table 4: 38 to 43 % on H100)."""


def on_datasheet(profile: Profile, sheet: Datasheet, precision: str) -> Profile:
    """Return the profile with estimated times on the device of a datasheet. Bytes do not change.

    Raises: PlanError if the profile has no counts of operations, or the device does not have the precision.
    """
    peak = COMPUTE_EFFICIENCY * sheet.peak(precision)
    if any(not measurement.work for measurement in profile.measurements):
        raise PlanError(
            f"the profile of {profile.graph.name} has no counts of operations and bytes: an earlier version of "
            "autopipe took it",
            remedy="profile the model again: autopipe profile TARGET",
        )
    return dataclasses.replace(
        profile,
        device=Device("gpu", sheet.name, sheet.memory_bytes),
        measurements=tuple(_estimated(m, profile.graph, peak, sheet.memory_bandwidth) for m in profile.measurements),
        optimizer_seconds_per_byte=(3 + 2 * profile.optimizer_bytes_per_byte) / sheet.memory_bandwidth,
    )


def describe(sheet: Datasheet, precision: str, profiled: str) -> str:
    """Return a description of the estimate for the user."""
    return (
        f"estimate, without measurements on such a device: operations and bytes counted on {profiled}, at "
        f"{COMPUTE_EFFICIENCY:.0%} of {sheet.peak(precision) / 1e12:.4g} TFLOP/s ({precision}) and "
        f"{in_bandwidth(sheet.memory_bandwidth, 4)} of memory bandwidth ({sheet.source}); kernel launches are not "
        "counted"
    )


def _estimated(measurement: Measurement, graph: Graph, peak: float, bandwidth: float) -> Measurement:
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
