"""Devices by name, as their makers describe them, and what a profile from one says about another: an estimate.

Rates are dense peaks (no sparsity). Memory counts 10^9 bytes a GB, which is at most what the device really offers.
A layer that computes runs as the ratio of the peaks, one that moves memory as the ratio of the bandwidths; a profile
does not say which is which, so the speed is given between both, with their geometric mean as the estimate.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from types import MappingProxyType

from autopipe.errors import PlanError, unknown_choice
from autopipe.ir.cluster import ClusterDevice

PRECISIONS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, slots=True)
class Datasheet:
    """``tensor_flops``: peak of fp16 and bf16 matrix units (``bf16``: whether it has the latter). Rates per second."""

    name: str
    memory_bytes: int
    memory_bandwidth: float
    fp32_flops: float
    tensor_flops: float
    bf16: bool
    source: str

    def peak(self, precision: str) -> float:
        """Return the peak rate at a precision. Raises: PlanError when the device does not have it."""
        if precision not in PRECISIONS:
            raise PlanError(unknown_choice("precision", precision, PRECISIONS))
        if precision == "bf16" and not self.bf16:
            raise PlanError(f"{self.name} has no bf16 matrix units", remedy="use fp16 or fp32")
        return self.fp32_flops if precision == "fp32" else self.tensor_flops


def _sheet(
    name: str, gigabytes: int, bandwidth: float, fp32_tera: float, tensor_tera: float, source: str, *, bf16: bool = True
) -> Datasheet:
    return Datasheet(name, gigabytes * 10**9, bandwidth * 1e9, fp32_tera * 1e12, tensor_tera * 1e12, bf16, source)


DATASHEETS = (
    _sheet("V100-16GB", 16, 900, 15.7, 125, "NVIDIA V100 Tensor Core GPU datasheet (SXM2), 2020", bf16=False),
    _sheet("V100-32GB", 32, 900, 15.7, 125, "NVIDIA V100 Tensor Core GPU datasheet (SXM2), 2020", bf16=False),
    _sheet("A100-40GB", 40, 1555, 19.5, 312, "NVIDIA A100 Tensor Core GPU datasheet (SXM), 2021"),
    _sheet("A100-80GB", 80, 2039, 19.5, 312, "NVIDIA A100 Tensor Core GPU datasheet (SXM), 2021"),
    _sheet("L40S", 48, 864, 91.6, 362.05, "NVIDIA L40S datasheet, 2023"),
    _sheet("H100-80GB", 80, 3350, 67, 989.5, "NVIDIA H100 Tensor Core GPU datasheet (SXM; half its sparse rate), 2023"),
    _sheet(
        "H200-141GB", 141, 4800, 67, 989.5, "NVIDIA H200 Tensor Core GPU datasheet (SXM; half its sparse rate), 2024"
    ),
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
    """How much faster a device is than the one profiled: between ``low`` and ``high``; ``estimate`` lies between."""

    low: float
    estimate: float
    high: float
    note: str


def datasheet(name: str) -> Datasheet:
    """Return a device's datasheet, by its name here or by a common one (``ALIASES``).

    Raises: PlanError with the known names.
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
    """Return the datasheet of a device as its driver names it (``NVIDIA A100-SXM4-80GB``); None if it is unknown.

    Raises: PlanError when the name leaves several.
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


def relative_speed(profiled: str, target: str, precision: str) -> Speed:
    """Return how fast ``target`` should run what was profiled on ``profiled``. Raises: PlanError."""
    a, b = datasheet(profiled), datasheet(target)
    compute, memory = b.peak(precision) / a.peak(precision), b.memory_bandwidth / a.memory_bandwidth
    low, high = min(compute, memory), max(compute, memory)
    estimate = math.sqrt(low * high)
    error = max(estimate / low, high / estimate) - 1
    between = f"within {error:.0%} ({low:.2f} to {high:.2f})"
    note = f"estimate from datasheets: {estimate:.2f} times the speed of {a.name}, {between}"
    return Speed(low, estimate, high, note)


def device_like(profiled: str, target: str, precision: str) -> ClusterDevice:
    """Return ``target`` as a device of a cluster, its speeds relative to the profiled device. Raises: PlanError.

    The optimizer's step moves memory and hardly computes: it runs as the ratio of the bandwidths.
    """
    sheet, memory_speed = datasheet(target), datasheet(target).memory_bandwidth / datasheet(profiled).memory_bandwidth
    speed = relative_speed(profiled, target, precision).estimate
    return ClusterDevice(sheet.name, sheet.memory_bytes, speed, memory_speed, sheet.name)
