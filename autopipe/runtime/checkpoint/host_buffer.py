"""``HostBuffer``: bytes in host memory, page-locked on request, in exactly the size that is needed.

torch's own allocator of page-locked memory rounds up to a power of two, so 20 GiB would take 32.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from autopipe.units import in_bytes


def queued_on_gpu(tensors: Iterable[torch.Tensor]) -> Any | None:
    """Return a CUDA event after all that this thread has queued; None if none of the tensors is on a GPU."""
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
    event.record(torch.cuda.current_stream())
    return event


class HostBuffer:
    """A buffer of bytes. It is unlocked when it is released, or collected, or the process ends.

    Args:
        num_bytes: its size.
        pinned: lock its pages, so that a GPU copies into it asynchronously.

    """

    def __init__(self, num_bytes: int, *, pinned: bool = False) -> None:
        # whole pages, which no other memory shares: a page can be locked only once
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = torch.empty(size + mmap.PAGESIZE if pinned else num_bytes, dtype=torch.uint8)
        begin = -memory.data_ptr() % mmap.PAGESIZE if pinned else 0
        self.bytes = memory[begin : begin + num_bytes]
        # why its pages are not locked although that was requested; "": they are, or it was not
        self.refusal = ""
        # events of copies into the buffer that may still run
        self._pending: list[Any] = []
        self._unlock: weakref.finalize[..., HostBuffer] | None = None
        if pinned and num_bytes:
            self._lock(self.bytes.data_ptr(), size)

    @property
    def pinned(self) -> bool:
        """Whether its pages are locked."""
        return self._unlock is not None and self._unlock.alive

    def _lock(self, pointer: int, size: int) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(pointer, size, 0))
        if code:
            _discard_last_error()
            self.refusal = f"CUDA cannot lock {in_bytes(size)} of host memory (cudaHostRegister: error {code})"
        else:
            self._unlock = weakref.finalize(self, _unlock, runtime, pointer, self._pending)

    def copies_end_with(self, event: Any) -> None:
        """Note a CUDA event, after which the copies into the buffer that were queued so far are complete."""
        self._pending.append(event)

    def wait(self) -> None:
        """Wait until the copies into the buffer are complete."""
        _wait(self._pending)

    def release(self) -> None:
        """Wait for the copies, unlock the pages, and forget the memory."""
        self.wait()
        if self._unlock is not None:
            self._unlock()
        self.bytes = torch.empty(0, dtype=torch.uint8)


def _wait(pending: list[Any]) -> None:
    while pending:
        pending[0].synchronize()
        del pending[0]


def _unlock(runtime: Any, pointer: int, pending: list[Any]) -> None:
    _wait(pending)  # a GPU must not write into memory that is free
    runtime.cudaHostUnregister(pointer)


def _discard_last_error() -> None:
    """Discard the error of a CUDA call of this thread. CUDA keeps it, and the next kernel would fail with it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
