"""A GPU as a timeline: a queue of kernels, a clock rate that falls with heat, and an L2 cache. It computes nothing."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from support.fake_gpu import allow_cuda

LAUNCH_SECONDS = 5e-6
COLD_SECONDS, BOOST = 0.02, 0.8  # until it has worked for so long, kernels take this part of their time
FLUSH_SECONDS, PRODUCT_SECONDS = 30e-6, 200e-6
CACHE_BYTES = 50 * 2**20


class VirtualGpu(TorchDispatchMode):
    """Runs the kernels that the host queues, one after the other. All times are in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.host = 0.0  # the time of the host
        self.free = 0.0  # when the queue is empty
        self.worked = 0.0
        self.cached = ""  # what the L2 cache contains

    def kernel(self, seconds: float, reads: str = "", launch: float = LAUNCH_SECONDS) -> None:
        """Queue a kernel. ``reads``: takes half the time if that is in the cache, and is there afterwards."""
        self.host += launch
        seconds *= BOOST if self.worked < COLD_SECONDS else 1.0
        seconds *= 0.5 if reads and reads == self.cached else 1.0
        self.free = max(self.free, self.host) + seconds
        self.worked += seconds
        self.cached = reads or self.cached

    def synchronize(self) -> None:
        self.host = max(self.host, self.free)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "mm":
            self.kernel(PRODUCT_SECONDS)
        if name == "zero_" and args[0].numel() >= CACHE_BYTES:
            self.kernel(FLUSH_SECONDS)
            self.cached = ""
        return func(*args, **(kwargs or {}))


class _Event:
    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu, self.at = gpu, 0.0

    def record(self, stream: Any = None) -> None:
        self.at = max(self._gpu.host, self._gpu.free)

    def query(self) -> bool:
        return self._gpu.host >= self.at

    def synchronize(self) -> None:
        self._gpu.host = max(self._gpu.host, self.at)

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.at - self.at)


@contextlib.contextmanager
def virtual_gpu() -> Iterator[VirtualGpu]:
    """Measure on a virtual GPU: with the events of ``torch.cuda``, and the clock of its host."""
    from autopipe.measure import clock

    allow_cuda()
    gpu = VirtualGpu()
    now = types.SimpleNamespace(perf_counter=lambda: gpu.host)
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(), gpu:
        patch.setattr(clock, "time", now)
        patch.setattr(clock, "HEAT_SECONDS", 2 * COLD_SECONDS)
        patch.setattr(torch.cuda, "Event", lambda enable_timing=False: _Event(gpu))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: gpu)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: gpu.synchronize())
        patch.setattr(
            torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(L2_cache_size=CACHE_BYTES)
        )
        yield gpu
