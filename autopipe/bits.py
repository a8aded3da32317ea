"""The bits of tensors: whether those of two tensors are the same, and their bytes for digests and files."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor, in the order of its dimensions: uint8 [number of bytes]."""
    return _plain(tensor).view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two dense tensors have the same shape, dtype and bits. -0.0 is not 0.0; a NaN may equal another.

    They may be on different devices.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    numbers = _INTEGERS.get(one.dtype.itemsize, torch.int64)
    return torch.equal(_plain(one).view(numbers), _plain(other.to(one.device)).view(numbers))


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
