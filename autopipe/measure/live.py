"""Bytes of live tensors: now, at most, and by owner.

On a CUDA device torch's allocator counts them. A CPU has no such count, so every operation is observed for the memory
that it allocates, which is subtracted when it is freed; memory that a kernel needs only while it runs is not seen.
Owners are counted in this way on any device.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe import sparse


class Meter(Protocol):
    """Counts the live bytes on a rank's device, within ``with``."""

    def __enter__(self) -> Any:
        """Start counting."""

    def __exit__(self, *error: Any) -> Any:
        """Stop counting."""

    def now(self) -> int:
        """Return the number of live bytes."""

    def restart(self) -> None:
        """Reset the peak."""

    def most(self) -> int:
        """Return the peak since ``restart``."""


class HostMeter(TorchDispatchMode):
    """Counts the memory of every tensor that an operation of this thread allocates, until it is freed."""

    def __init__(self, kind: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.owner = 0  # of new memory
        self._kind = kind  # of the device that is counted
        self._owned: Counter[int] = Counter()  # owner -> live bytes
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._now = self._most = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count its results."""
        result = func(*args, **(kwargs or {}))
        if type(result) is torch.Tensor:
            self.count(result)
            return result
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to disable the compiler around each operation would take longer than to count it."""
        return False

    def count(self, tensor: torch.Tensor) -> None:
        """Count the memory of a tensor; memory that several tensors share counts once."""
        storage = sparse.memory_of(tensor)
        key, size = storage._cdata, storage.nbytes()
        if key in self._live or tensor.device.type != self._kind:
            return
        owner = self.owner

        def freed(_: object) -> None:
            self._now -= size
            self._owned[owner] -= size
            del self._live[key]

        self._live[key] = weakref.ref(storage, freed)
        self._now += size
        self._owned[owner] += size
        self._most = max(self._most, self._now)

    def exclude(self, tensor: torch.Tensor) -> None:
        """Never count the memory of a tensor."""
        storage = tensor.untyped_storage()
        key = storage._cdata

        def freed(_: object) -> None:
            del self._live[key]

        self._live[key] = weakref.ref(storage, freed)

    def held_by(self, owner: int) -> int:
        """Return the live bytes that were allocated for an owner."""
        return self._owned[owner]

    def now(self) -> int:
        """Return the number of live bytes."""
        return self._now

    def restart(self) -> None:
        """Reset the peak."""
        self._most = self._now

    def most(self) -> int:
        """Return the peak since ``restart``."""
        return self._most


class CudaMeter:
    """Reads torch's allocator, which counts every byte that tensors and kernels take on the device."""

    def __enter__(self) -> CudaMeter:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: the allocator always counts."""

    def now(self) -> int:
        """Return the number of live bytes."""
        return torch.cuda.memory_allocated()

    def restart(self) -> None:
        """Reset the peak."""
        torch.cuda.reset_peak_memory_stats()

    def most(self) -> int:
        """Return the peak since ``restart``."""
        return torch.cuda.max_memory_allocated()


def meter_of(device: torch.device) -> Meter:
    """Return the meter of a device."""
    return CudaMeter() if device.type == "cuda" else HostMeter()


class Workspace:
    """The additional memory of the calls within ``with``, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.peak = 0  # the most at any time
        self.left = 0  # still live at the end
        self._meter = meter_of(device)
        self._before = 0

    def __enter__(self) -> Workspace:
        self._meter.__enter__()
        self._before = self._meter.now()
        self._meter.restart()
        return self

    def __exit__(self, *error: Any) -> None:
        self.peak, self.left = self._meter.most() - self._before, self._meter.now() - self._before
        self._meter.__exit__(*error)
