"""Bytes of tensors that are held: now, at most, and by whom.

On a CUDA device torch's allocator tells how many; on a CPU nothing does, so every operation is looked at for memory
that it makes, which is forgotten when it goes. What a kernel needs only while it runs is not seen there. Whose they are
is told in this way on any device.
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
    """Tells how many bytes a rank's device holds. Within ``with`` it watches."""

    def __enter__(self) -> Any:
        """Begin to watch."""

    def __exit__(self, *error: Any) -> Any:
        """Stop watching."""

    def now(self) -> int:
        """Return the bytes that are held."""

    def restart(self) -> None:
        """Forget the most."""

    def most(self) -> int:
        """Return the most bytes that were held since ``restart``."""


class HostMeter(TorchDispatchMode):
    """Counts the memory of every tensor that an operation of this thread makes, for as long as somebody holds it.

    ``kind``: of the device that is counted. ``owner``: whose is what is made now.
    """

    def __init__(self, kind: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation for it
        self.owner = 0
        self._kind = kind
        self._owned: Counter[int] = Counter()
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._now = self._most = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's memory, once, however many tensors share it."""
        storage = sparse.memory_of(tensor)
        key, size = storage._cdata, storage.nbytes()
        if key in self._held or tensor.device.type != self._kind:
            return
        owner = self.owner

        def gone(_: object) -> None:
            self._now -= size
            self._owned[owner] -= size
            del self._held[key]

        self._held[key] = weakref.ref(storage, gone)
        self._now += size
        self._owned[owner] += size
        self._most = max(self._most, self._now)

    def held_by(self, owner: int) -> int:
        """Return the bytes of what was made under an owner and is still held, whoever holds it."""
        return self._owned[owner]

    def now(self) -> int:
        """Return the bytes that are held."""
        return self._now

    def restart(self) -> None:
        """Forget the most."""
        self._most = self._now

    def most(self) -> int:
        """Return the most since then."""
        return self._most


class CudaMeter:
    """Asks torch's allocator, which knows every byte that tensors and kernels take on the device."""

    def __enter__(self) -> CudaMeter:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was begun."""

    def now(self) -> int:
        """Return the bytes that are held."""
        return torch.cuda.memory_allocated()

    def restart(self) -> None:
        """Forget the most."""
        torch.cuda.reset_peak_memory_stats()

    def most(self) -> int:
        """Return the most since then."""
        return torch.cuda.max_memory_allocated()


def meter_of(device: torch.device) -> Meter:
    """Return what counts on a device."""
    return CudaMeter() if device.type == "cuda" else HostMeter()


class Workspace:
    """What a call holds beyond what was there before: the ``peak``, and what is ``left`` when it is over. Bytes."""

    def __init__(self, device: torch.device) -> None:
        self.peak = self.left = 0
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
