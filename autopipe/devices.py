"""What of a captured graph names a device, on another one: models are captured on the CPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

_CAPTURED = "cpu"  # the type of the device on which models are captured
_OF_A_DEVICE = re.compile(r"CUDA error|cuDNN error|CU[A-Z]+_STATUS_|out of memory|on the same device")


def autocast_on(device: torch.device, meta: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return (device, dtype, enabled, cache) of every autocast region that a node with this ``meta`` runs in.

    A region of the CPU is one of the device that computes, as in the stage files.
    """
    entries = meta.get("autocast") or ()
    regions = (entries,) if entries and isinstance(entries[0], str) else entries
    return tuple((device.type if kind == _CAPTURED else kind, *rest) for kind, *rest in regions)


def arguments_on(device: torch.device, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call, in which the device of the capture is replaced by the one that computes."""
    if device.type == _CAPTURED:
        return args, kwargs

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value.type == _CAPTURED else value

    args, kwargs = fx.node.map_aggregate(args, moved), dict(fx.node.map_aggregate(kwargs, moved))
    if kwargs.get("device") == _CAPTURED:
        kwargs["device"] = device
    return args, kwargs


def reraise_failure_of_device(error: BaseException) -> None:
    """Raise an error again if a GPU is its cause: it tells nothing about the model, and may repeat."""
    cause, met = error.__cause__, [error]
    while cause is not None and cause not in met:  # an error may be its own cause
        met.append(cause)
        cause = cause.__cause__
    if any(isinstance(one, torch.OutOfMemoryError) or _OF_A_DEVICE.search(str(one)) for one in met):
        raise error
