"""Scalars between host and device, without a synchronization for each of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def read_together(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors of one element as one float64 vector on the host. One synchronization with each device."""
    values = torch.zeros(len(scalars), dtype=torch.float64)
    places: dict[torch.device, list[int]] = {}
    for place, scalar in enumerate(scalars):
        places.setdefault(scalar.device, []).append(place)
    for on_device in places.values():
        values[on_device] = torch.stack([scalars[p].detach().double().reshape(()) for p in on_device]).cpu()
    return values


def copied_to(device: torch.device, scalar: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the host on a device. From page-locked memory, so that the host does not wait for the copy."""
    if device.type != "cuda":
        return scalar.to(device)
    return scalar.pin_memory().to(device, non_blocking=True)
