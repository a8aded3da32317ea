"""``Snapshot``: copies of tensors in one host buffer, and the safetensors file of them.

On a CPU, training stops while a checkpoint is copied, and continues while it is written. A GPU copies in the order of
its stream, before the next step changes the tensors; the host queues further work meanwhile, and the writing thread
waits for the copy. The buffer is reused for the next checkpoint, so that the copy is short.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import _TYPES, save_file

from autopipe import sparse
from autopipe.errors import ArtifactError
from autopipe.runtime.checkpoint.host_buffer import HostBuffer, queued_on_gpu

_ALIGNMENT = 16  # bytes; torch views only aligned memory as another type
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


class Snapshot:
    """A reusable buffer of copies. ``pinned``: in page-locked memory, into which a GPU copies asynchronously."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._buffer = HostBuffer(0)
        # views of the buffer, by their keys in the file
        self._copies: dict[str, torch.Tensor] = {}
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

    def take(self, tensors: Mapping[str, torch.Tensor], *, change: bool = True) -> None:
        """Copy the tensors, each in the order of its dimensions, and overwrite the previous copy.

        ``change``: they may change before they are written; else those of the CPU are not copied.

        Raises: ArtifactError for a dtype that the format does not support.
        """
        self.names = tuple(sorted(tensors))
        tensors = sparse.encoded(tensors)
        for name, tensor in tensors.items():
            if tensor.dtype not in _TYPES.values():
                raise ArtifactError(f"{name} is {tensor.dtype}, which a checkpoint cannot hold")
        unchanged = {} if change else _separate_on_host(tensors)
        self._copy({name: tensor for name, tensor in tensors.items() if name not in unchanged})
        self._copies.update(unchanged)

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        places, end = dict[str, tuple[int, int]](), 0
        for name, tensor in tensors.items():
            begin = end + -end % _ALIGNMENT
            end = begin + tensor.numel() * tensor.element_size()
            places[name] = begin, end
        if end > self._buffer.bytes.numel():
            self._copies = {}
            self._buffer.release()  # free the old one first
            self._buffer = HostBuffer(end, pinned=self._pinned)
        self._copies = {
            name: self._buffer.bytes[begin:end].view(tensors[name].dtype).view(tensors[name].shape)
            for name, (begin, end) in places.items()
        }
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor.detach(), non_blocking=self._buffer.pinned)
        copied = queued_on_gpu(tensors.values()) if self._buffer.pinned else None
        if copied is not None:
            self._buffer.copies_end_with(copied)

    def write(self, path: Path) -> None:
        """Write and flush the file. Waits for the copies of a GPU. Raises: OSError."""
        self._buffer.wait()
        path.touch(0o644)
        mode = path.stat().st_mode
        try:
            save_file(self._copies, path)
        except SafetensorError as error:
            code = _OS_ERROR.search(str(error))
            raise (OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(str(error))) from error
        path.chmod(mode)  # safetensors writes files that only their owner can read
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _separate_on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of the CPU that lie in the order of their dimensions, and share no memory with another one."""
    by_memory: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    alone = (names[0] for names in by_memory.values() if len(names) == 1)
    return {
        name: tensors[name].detach()
        for name in alone
        if tensors[name].device.type == "cpu"
        and tensors[name].is_contiguous()
        and not (tensors[name].is_conj() or tensors[name].is_neg())  # bits that say how to read the memory
    }
