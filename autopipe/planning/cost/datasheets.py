"""Datasheets of devices, and the speed of one device relative to another, as an estimate.

Rates are dense peaks, without sparsity. A GB of memory is 10^9 bytes, which no device falls short of. The speed of a
layer that is bound by computation changes with the peak rate, that of one bound by memory with the bandwidth. A profile
does not say which applies, so the speed is a range between the two ratios, with their geometric mean as the estimate.

``on_datasheet`` estimates the times of a profile on another device.
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
import math
import re
from dataclasses import dataclass
from types import MappingProxyType

from autopipe.errors import PlanError, unknown_choice
from autopipe.ir.cluster import ClusterDevice
from autopipe.ir.graph import Graph
from autopipe.ir.profile import Device, Measurement, NodeCost, NodeWork, PassWork, Profile
from autopipe.units import in_bandwidth

PRECISIONS = ("fp32", "fp16", "bf16")
COMPUTE_EFFICIENCY = 0.6
"""The fraction of the peak rate that matrix products, convolutions and attention reach: an assumption.

Their reads and writes are charged at the full bandwidth. A large transformer then reaches about 40 % of the peak, as
is reported for training such models (Llama 3, arXiv:2407.21783, table 4: 38 to 43 % on H100)."""


@dataclass(frozen=True, slots=True)
class Datasheet:
    """The figures of a device from its maker."""

    name: str
    memory_bytes: int
    memory_bandwidth: float  # bytes per second
    fp32_flops: float  # operations per second
    tensor_flops: float  # operations per second of the fp16 and bf16 matrix units
    bf16: bool  # whether it has bf16 matrix units
    source: str  # the document
    link_bandwidth: float  # bytes per second to another one of the same host, in one direction
    host_bandwidth: float  # bytes per second that copies between it and its host reach, in one direction

    def peak(self, precision: str) -> float:
        """Return the peak operations per second. Raises: PlanError if the device does not have the precision."""
        if precision not in PRECISIONS:
            raise PlanError(unknown_choice("precision", precision, PRECISIONS))
        if precision == "bf16" and not self.bf16:
            raise PlanError(f"{self.name} has no bf16 matrix units", remedy="use fp16 or fp32")
        return self.fp32_flops if precision == "fp32" else self.tensor_flops


def _sheet(
    name: str,
    gigabytes: int,
    bandwidth: float,
    fp32_tera: float,
    tensor_tera: float,
    source: str,
    *,
    bf16: bool = True,
    link: float = 32,  # PCIe 4.0 x16
    host: float = 25,  # of the 32 of PCIe 4.0 x16
) -> Datasheet:
    rates = bandwidth * 1e9, fp32_tera * 1e12, tensor_tera * 1e12
    return Datasheet(name, gigabytes * 10**9, *rates, bf16, source, link * 1e9, host * 1e9)


_V100 = "NVIDIA V100 Tensor Core GPU datasheet (SXM2), 2020"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet (SXM), 2021"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet (SXM; half its sparse rate), 2023"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet (SXM; half its sparse rate), 2024"


DATASHEETS = (
    _sheet("V100-16GB", 16, 900, 15.7, 125, _V100, bf16=False, link=150, host=12),
    _sheet("V100-32GB", 32, 900, 15.7, 125, _V100, bf16=False, link=150, host=12),
    _sheet("A100-40GB", 40, 1555, 19.5, 312, _A100, link=300),
    _sheet("A100-80GB", 80, 2039, 19.5, 312, _A100, link=300),
    _sheet("L40S", 48, 864, 91.6, 362.05, "NVIDIA L40S datasheet, 2023"),
    _sheet("H100-80GB", 80, 3350, 67, 989.5, _H100, link=450, host=50),
    _sheet("H200-141GB", 141, 4800, 67, 989.5, _H200, link=450, host=50),
)

ALIASES = MappingProxyType(
    {
        "v100": "V100-16GB",
        "a100": "A100-80GB",
        "a100-sxm": "A100-80GB",
        "h100": "H100-80GB",
        "h100-sxm": "H100-80GB",
        "h200": "H200-141GB",
        "h200-sxm": "H200-141GB",
    }
)


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a device relative to the profiled one."""

    low: float  # the smaller one of the ratios of peak rates and bandwidths
    estimate: float  # their geometric mean
    high: float
    note: str  # for the user


def datasheet(name: str) -> Datasheet:
    """Return the datasheet of a device, by its name or a common alias (``ALIASES``).

    Raises: PlanError with the known names if the name is unknown.
    """
    wanted = ALIASES.get(name.lower(), name).lower()
    known = {sheet.name.lower(): sheet for sheet in DATASHEETS}.get(wanted)
    if known is None:
        raise PlanError(
            unknown_choice("device", name, (sheet.name for sheet in DATASHEETS)),
            remedy="name one of these, or describe the device in a cluster file",
        )
    return known


def recognized(device: str) -> Datasheet | None:
    """Return the datasheet for a device name from the driver (``NVIDIA A100-SXM4-80GB``), or None if it is unknown.

    Raises: PlanError if the name is ambiguous.
    """
    words = re.split(r"[\s-]+", device.lower())
    family = [sheet for sheet in DATASHEETS if sheet.name.split("-")[0].lower() in words]
    sized = [sheet for sheet in family if sheet.name.split("-")[-1].lower() in words]
    matching = sized or family
    if len(matching) > 1:
        raise PlanError(
            f"the profile was taken on {device!r}, which may be {' or '.join(sheet.name for sheet in matching)}",
            remedy="describe the device in a cluster file, with its speed relative to the profiled one",
        )
    return matching[0] if matching else None


def utilization(flops_per_second: float, device: str, precision: str) -> float | None:
    """Return the model FLOPs utilization (MFU) of a device; None if the device has no datasheet or not the precision.

    MFU is the rate at which training does the operations that the model needs, relative to the peak rate of the device
    (Chowdhery et al.: PaLM, arXiv:2204.02311, appendix B). Those are the matrix products, convolutions and attention of
    one forward and one backward (``NodeWork.model_flops``). Recompute, and the products that a fused attention repeats
    in its backward, take time and do not count. PaLM takes 6 operations per token and parameter, and 12 per token,
    layer, token of the context and width for attention; here they are counted from the shapes, so that embeddings,
    which are looked up, count 0, and frozen parameters have no gradient. Causal attention counts all pairs, as there.

    ``flops_per_second``: of one device. ``device``: its name from the driver. ``precision``: of the matrix products.
    The peak is dense, and for fp32 without TF32.
    """
    try:
        sheet = recognized(device)
        return None if sheet is None else flops_per_second / sheet.peak(precision)
    except PlanError:  # the name is ambiguous, or it has no bf16
        return None


def relative_speed(profiled: str, target: str, precision: str) -> Speed:
    """Return the speed of ``target`` relative to ``profiled``. Raises: PlanError for unknown names or precisions."""
    a, b = datasheet(profiled), datasheet(target)
    compute, memory = b.peak(precision) / a.peak(precision), b.memory_bandwidth / a.memory_bandwidth
    low, high = min(compute, memory), max(compute, memory)
    estimate = math.sqrt(low * high)
    error = max(estimate / low, high / estimate) - 1
    between = f"within {error:.0%} ({low:.2f} to {high:.2f})"
    note = f"estimate from datasheets: {estimate:.2f} times the speed of {a.name}, {between}"
    return Speed(low, estimate, high, note)


def device_like(profiled: str, target: str, precision: str) -> ClusterDevice:
    """Return ``target`` as a device of a cluster, with speeds relative to the profiled device.

    The optimizer's step is bound by memory, so its speed is the ratio of the bandwidths.

    Raises: PlanError for unknown names or precisions.
    """
    sheet, memory_speed = datasheet(target), datasheet(target).memory_bandwidth / datasheet(profiled).memory_bandwidth
    speed = relative_speed(profiled, target, precision).estimate
    return ClusterDevice(sheet.name, sheet.memory_bytes, speed, memory_speed, sheet.name, sheet.host_bandwidth)


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
