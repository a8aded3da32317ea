"""The message for an absent gradient: a tensor that represents ``None``.

An opaque module may leave what it reads unused in one batch. Plain training then gives the parameters before it no
gradient, and their optimizer skips them; zeros would decay them. A message between stages is always a tensor, so a
NaN with a payload that no arithmetic produces represents ``None``. Copies and transports keep its bits.
"""

from __future__ import annotations

import torch

_BITS = {
    2: (torch.int16, 0x7FE7),
    4: (torch.int32, 0x7FC0A7E1),
    8: (torch.int64, 0x7FF8A7E1A7E1A7E1),
}  # of a NaN in float16 and bfloat16, float32, and float64


def absent(like: torch.Tensor) -> torch.Tensor:
    """Return the absent gradient of a tensor of this shape, dtype and strides."""
    marker = torch.zeros_like(like, requires_grad=False)
    _as_bits(marker).fill_(_BITS[_real(marker).element_size()][1])
    return marker


def is_absent(gradient: torch.Tensor) -> bool:
    """Return whether a received gradient is absent. Reads one element, which synchronizes with the device."""
    if not gradient.numel():
        return False
    first = _as_bits(gradient.detach()).flatten()[0]
    return int(first) == _BITS[_real(gradient).element_size()][1]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    real = _real(tensor)
    return real.view(_BITS[real.element_size()][0])
