"""``GpuLoad``: keeps a GPU busy, warm and its cache cold, so that a call is timed as it runs in training.

- Before a call, matrix products occupy the GPU while the host queues the call. Training runs ahead in the same way, so
  that the time of a kernel does not contain its launch.
- A GPU that was idle runs at a clock rate which it cannot keep up. Products of the tensor cores, which need the most
  power, bring it to the rate of a long training.
- The first kernel of a repetition would find what the last one of the repetition before has left in the L2 cache. A
  write of twice its size removes that.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

SIDES = (64, 256, 1024, 4096)  # of the matrices: a product of the largest takes 0.2 ms on an H100, 3 ms on a T4
ENOUGH_SECONDS = 1e-4
"""The smallest matrices are used whose product takes this long."""
WARM_UP, TIMED = 5, 20
UNKNOWN_CACHE_BYTES = 128 * 2**20


class GpuLoad:
    """Keeps one GPU busy with matrix products and writes. Nothing reads their results."""

    def __init__(self, device: torch.device) -> None:
        cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or UNKNOWN_CACHE_BYTES
        self._device = device
        self._written = torch.empty(2 * cache, dtype=torch.uint8, device=device)
        for side in SIDES:
            self._matrix = torch.empty((side, side), dtype=torch.float16, device=device).normal_()
            self._product = torch.empty_like(self._matrix)
            self._seconds = self._timed()
            if self._seconds >= ENOUGH_SECONDS:
                break

    def _timed(self) -> float:
        self._multiply(WARM_UP)
        start, end = event(), event()
        start.record()
        self._multiply(TIMED)
        end.record()
        end.synchronize()
        return max(float(start.elapsed_time(end)) / 1e3 / TIMED, 1e-6)

    def occupy(self, seconds: float) -> None:
        """Queue products that take about ``seconds``."""
        self._multiply(math.ceil(seconds / self._seconds))

    def heat(self, seconds: float) -> None:
        """Compute products for about ``seconds``."""
        self.occupy(seconds)
        torch.cuda.current_stream(self._device).synchronize()

    def flush_cache(self) -> None:
        """Queue a write that replaces the contents of the L2 cache."""
        self._written.zero_()

    def _multiply(self, count: int) -> None:
        with _any_algorithm():
            for _ in range(count):
                torch.mm(self._matrix, self._matrix, out=self._product)


@contextlib.contextmanager
def _any_algorithm() -> Iterator[None]:
    """Permit products although the user's code requires deterministic algorithms, which cuBLAS needs a variable for."""
    required = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if required:
        torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        if required:
            torch.use_deterministic_algorithms(True, warn_only=warns)


def event() -> Any:
    """Return a CUDA event that records its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
