"""Scalars between host and device, without a synchronization for each of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def read_together(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors of one element as one float64 vector on the host. One synchronization with the device."""
    if not scalars:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([scalar.detach().double().reshape(()) for scalar in scalars]).cpu()


def copied_to(device: torch.device, scalar: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the host on a device. From page-locked memory, so that the host does not wait for the copy."""
    if device.type != "cuda":
        return scalar.to(device)
    return scalar.pin_memory().to(device, non_blocking=True)
