"""``Snapshot``: copies of tensors in one buffer with the layout of a safetensors file.

On a CPU, training stops while a checkpoint is copied, and continues while it is written. A GPU copies in the order of
its stream, before the next step changes the tensors; the host queues further work meanwhile, and the writing thread
waits for the copy. So the copy must be short and the writing cheap: the buffer is reused for the next checkpoint, and
the SHA-256 of the file is computed from memory while the file is written.

The file: 8 bytes, the length of the header; the header, JSON with dtype, shape and offsets of each tensor; the data.
Source: the format section of the safetensors README.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import _TYPES

from autopipe import sparse
from autopipe.errors import ArtifactError
from autopipe.runtime.checkpoint.host_buffer import HostBuffer

_CHUNK_BYTES = 64 * 2**20
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


class Snapshot:
    """A reusable buffer of copies. ``pinned``: in page-locked memory, into which a GPU copies asynchronously."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._buffer = HostBuffer(0)
        self._header = b""
        self._num_bytes = 0
        # of the copied tensors; a sparse one is stored as its parts, see ``autopipe.sparse``
        self.names: tuple[str, ...] = ()

    @property
    def refusal(self) -> str:
        """Why the buffer is not in page-locked memory although that was requested; "" if there is no reason."""
        return self._buffer.refusal

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        """Return a snapshot of some tensors. Raises: ArtifactError as ``take`` does."""
        snapshot = Snapshot()
        snapshot.take(tensors)
        return snapshot

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors, each in the order of its dimensions, and overwrite the previous copy.

        Raises: ArtifactError for a dtype that the format does not support.
        """
        self.names = tuple(sorted(tensors))
        tensors = sparse.encoded(tensors)
        # the largest elements first, so that every offset is a multiple of the element size
        names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header: dict[str, object] = {}
        begin = 0
        for name in names:
            tensor = tensors[name]
            if tensor.dtype not in _NAMES:
                raise ArtifactError(f"{name} is {tensor.dtype}, which a checkpoint cannot hold")
            end = begin + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
            begin = end
        if begin > self._buffer.bytes.numel():
            self._buffer.release()  # free the old one first
            self._buffer = HostBuffer(begin, pinned=self._pinned)
        self._fill([tensors[name] for name in names])
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self._num_bytes = begin

    def _fill(self, tensors: list[torch.Tensor]) -> None:
        begin = 0
        for tensor in tensors:
            end = begin + tensor.numel() * tensor.element_size()
            if end > begin:
                place = self._buffer.bytes[begin:end].view(tensor.dtype).view(tensor.shape)
                place.copy_(tensor.detach(), non_blocking=self._buffer.pinned)
            begin = end
        if self._buffer.pinned and any(tensor.is_cuda for tensor in tensors):
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
            copied.record(torch.cuda.current_stream())
            self._buffer.copies_end_with(copied)

    def write(self, path: Path) -> tuple[str, int]:
        """Write and flush the file, and return its SHA-256 and its size in bytes. Waits for the copies of a GPU.

        Raises: OSError.
        """
        self._buffer.wait()
        data = self._buffer.bytes[: self._num_bytes].numpy().data
        digest = hashlib.sha256(self._header)
        hashing = threading.Thread(target=digest.update, args=(data,), name="sha256")
        hashing.start()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                for piece in (memoryview(self._header), data):
                    _write_all(descriptor, piece)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        finally:
            hashing.join()
        return digest.hexdigest(), len(self._header) + self._num_bytes


def _write_all(descriptor: int, data: memoryview) -> None:
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written : written + _CHUNK_BYTES])
