"""``Messages``: what stages give one another, on the host until it is needed.

A tensor remains the same object, with its hooks; only its memory is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autopipe.ir.schedule import Instruction
from autopipe.runtime.checkpoint.host_buffer import HostBuffer
from autopipe.runtime.spilling.copies import Done, Lane
from autopipe.runtime.spilling.flat_buffers import Flat, flat_view


@dataclass(frozen=True, slots=True)
class _OnHost:
    tensor: torch.Tensor  # so that no other tensor takes its identity
    buffer: HostBuffer
    written: Done


Key = tuple[int, int, int]


def _key(i: Instruction) -> Key:
    return i.stage, i.minibatch, i.microbatch


class Messages:
    """The messages of one rank that are on the host.

    Args:
        device: of the rank.
        to_device: the lane to it.
        to_host: the lane from it.
        register: called with the host memory.

    """

    def __init__(
        self, device: torch.device, to_device: Lane, to_host: Lane, register: Callable[[torch.Tensor], None]
    ) -> None:
        self._device, self._to_device, self._to_host, self._register = device, to_device, to_host, register
        self._on_host: dict[int, _OnHost] = {}  # by the identity of the tensor
        # what was brought for a microbatch, with the version of the tensor: if it does not change, it need not go back
        self._loaded: dict[Key, dict[int, tuple[_OnHost, int]]] = {}
        self._leaving: Done | None = None
        self._pool: dict[int, list[HostBuffer]] = {}  # bytes -> buffers that are free

    def load(self, i: Instruction, tensors: Sequence[torch.Tensor]) -> Done | None:
        """Begin to bring tensors to the device. Return the end of it; None if they are there."""
        pairs, after = [], []
        loaded = self._loaded[_key(i)] = {}
        for tensor in tensors:
            home = self._on_host.pop(id(tensor), None)
            if home is None:
                continue
            place = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
            pairs.append((flat_view(place), flat_view(tensor)))
            tensor.data = place
            after.append(home.written)
            loaded[id(tensor)] = home, tensor._version
        return self._to_device.copy(i, pairs, after) if pairs else None

    def unload(self, i: Instruction, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to bring tensors to the host. At most those of one instruction are on their way."""
        if self._leaving is not None:
            self._leaving.synchronize()
            self._leaving = None
        loaded = self._loaded.pop(_key(i), {})
        for tensor in tensors:
            copy, version = loaded.get(id(tensor), (None, -1))
            if copy is not None and tensor._version == version:
                (tensor.data,) = Flat([tensor]).views(copy.buffer.bytes)
                self._on_host[id(tensor)] = copy
                del loaded[id(tensor)]
        for unneeded, _ in loaded.values():
            self._pool.setdefault(unneeded.buffer.bytes.numel(), []).append(unneeded.buffer)
        moving = [t for t in tensors if id(t) not in self._on_host and t.layout == torch.strided and t.numel()]
        if not moving:
            return
        buffers = [self._buffer(Flat([tensor]).num_bytes) for tensor in moving]
        pairs = []
        for tensor, buffer in zip(moving, buffers, strict=True):
            (home,) = Flat([tensor]).views(buffer.bytes)
            pairs.append((flat_view(home), flat_view(tensor)))
            tensor.data = home
        self._leaving = self._to_host.copy(i, pairs, [])
        for tensor, buffer in zip(moving, buffers, strict=True):
            self._on_host[id(tensor)] = _OnHost(tensor, buffer, self._leaving)

    def _buffer(self, size: int) -> HostBuffer:
        if self._pool.get(size):
            return self._pool[size].pop()
        with _disable_current_modes():
            buffer = HostBuffer(size, pinned=self._device.type == "cuda")
        self._register(buffer.bytes)
        return buffer
