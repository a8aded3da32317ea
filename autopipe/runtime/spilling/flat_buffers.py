"""Tensors in one flat block of memory, on the host or on the device, at the same places."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopipe.strides import extent

ALIGNMENT = 64
"""Bytes, as torch's allocator aligns tensors on a CPU: kernels may add up in another order elsewhere."""


class Flat:
    """The places of some tensors in a flat block. Their order in memory (strides) is preserved."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._kinds = [(tensor.dtype, tuple(tensor.shape), tensor.stride()) for tensor in tensors]
        self._begins: list[int] = []
        self.num_bytes = 0
        for tensor in tensors:
            self._begins.append(self.num_bytes)
            self.num_bytes += -(-extent(tensor.shape, tensor.stride()) * tensor.element_size() // ALIGNMENT) * ALIGNMENT

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether these tensors have the same dtypes, shapes and strides."""
        return self._kinds == [(tensor.dtype, tuple(tensor.shape), tensor.stride()) for tensor in tensors]

    def views(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in a block of bytes that is at least ``num_bytes`` long."""
        views = []
        for begin, (dtype, shape, stride) in zip(self._begins, self._kinds, strict=True):
            size = extent(shape, stride)
            part = block[begin : begin + size * dtype.itemsize].view(dtype)
            views.append(part.as_strided(shape, stride) if size else part.view(shape))
        return views


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a strided tensor from its first element to its last, in one dimension."""
    return tensor.detach().as_strided((extent(tensor.shape, tensor.stride()),), (1,))
