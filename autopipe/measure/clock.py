"""One clock for CPU and GPU, and medians of repeated calls in several windows of time.

- GPU: CUDA events around the call, while the GPU is busy and warm (``GpuLoad``).
- CPU with one thread: the CPU time of that thread, which also runs the backward of CPU tensors. Other programs on the
  machine do not lengthen it; ``steal_time`` tells how much time they took.
- CPU with more threads: wall-clock time.

A core that is shared with another virtual machine can run at half speed for seconds, longer than any series of
repetitions here. Everything is therefore measured in several windows, far apart, and on a CPU the fastest window
counts. On a GPU the median window counts: its fastest one shows a clock rate that it cannot keep up.

``GpuLoad`` keeps a GPU busy, warm and its cache cold, so that a call is timed as it runs in training.

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
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch

LEAST_LEAD_SECONDS, MOST_LEAD_SECONDS = 1e-3, 20e-3
"""The shortest and the longest work that a GPU does while the host queues a call."""
HEAT_SECONDS, REHEAT_SECONDS = 2.0, 0.2
"""How long a GPU works before the first window of time, and before each later one."""

_SIDES = (64, 256, 1024, 4096)  # of the matrices: a product of the largest takes 0.2 ms on an H100, 3 ms on a T4
LONG_SECONDS = 0.1
"""A call that takes longer is not repeated: other work on the machine changes its time by a small part only."""
ENOUGH_SECONDS = 1e-4
"""The smallest matrices are used whose product takes this long."""
WARM_UP, TIMED = 5, 20
_UNKNOWN_CACHE_BYTES = 128 * 2**20


@dataclass
class Clock:
    """Times calls on one device."""

    device: torch.device
    threads: int = 1
    load: GpuLoad | None = None  # of a GPU, shared by its clocks; None: none is on the device yet
    wall_seconds: float = field(default=0.0, init=False)  # sum over all calls, on a CPU
    own_seconds: float = field(default=0.0, init=False)  # CPU time of this thread in all calls
    _lead: float = field(default=LEAST_LEAD_SECONDS, init=False)  # seconds of work that a GPU does before a call

    def time(self, call: Callable[[], Any], *, kernels_only: bool = False) -> tuple[Any, float]:
        """Return the result of a call and its seconds.

        ``kernels_only``: on a GPU, also if the host needs longer to queue the call than the GPU to run it. Training is
        not faster than the host.
        """
        if self.device.type == "cuda":
            return self._time_cuda(call, kernels_only)
        own, wall = time.thread_time_ns(), time.perf_counter_ns()
        result = call()
        wall, own = time.perf_counter_ns() - wall, time.thread_time_ns() - own
        self.wall_seconds += wall / 1e9
        self.own_seconds += own / 1e9
        return result, (own if self.threads == 1 else wall) / 1e9

    def _time_cuda(self, call: Callable[[], Any], kernels_only: bool) -> tuple[Any, float]:
        load = self.load = self.load or GpuLoad(self.device)
        start, end, stream = _event(), _event(), torch.cuda.current_stream(self.device)
        load.occupy(self._lead)
        load.flush_cache()
        start.record(stream)
        begin = time.perf_counter()
        result = call()
        host = time.perf_counter() - begin
        ahead = not start.query()
        end.record(stream)
        end.synchronize()
        seconds = float(start.elapsed_time(end)) / 1e3
        self._lead = min(max(1.25 * host, 0.8 * self._lead, LEAST_LEAD_SECONDS), MOST_LEAD_SECONDS)
        # if the host did not run ahead, the call waited for the GPU, and ``host`` contains the lead
        return result, max(seconds, host) if ahead and not kernels_only else seconds

    def heat(self, *, again: bool = False) -> None:
        """Bring a GPU to the clock rate of a long training. ``again``: it was hot a moment ago."""
        if self.device.type == "cuda":
            self.load = self.load or GpuLoad(self.device)
            self.load.heat(REHEAT_SECONDS if again else HEAT_SECONDS)

    def typical(self, seconds: Sequence[float]) -> float:
        """Return the time of a call from a few of them: on a CPU the shortest, on a GPU the median."""
        return statistics.median(seconds) if self.device.type == "cuda" else min(seconds)

    def windows(self) -> Windows:
        """Return the windows of a call before the first one."""
        return Windows(fastest=self.device.type != "cuda")

    @property
    def steal_time(self) -> float:
        """The fraction of the time in which other programs ran, 0 .. 1; 0 if the clock cannot tell."""
        if self.device.type == "cuda" or self.threads != 1 or not self.wall_seconds:
            return 0.0
        return max(1 - self.own_seconds / self.wall_seconds, 0.0)


@dataclass(frozen=True, slots=True)
class Times:
    """Repeated forwards and backwards of the same call, in seconds."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @property
    def medians(self) -> tuple[float, float]:
        """The median forward and the median backward."""
        return statistics.median(self.forward), statistics.median(self.backward)

    @property
    def spread(self) -> float | None:
        """The interquartile range of forward plus backward, relative to the median; None below 4 repetitions."""
        totals = [f + b for f, b in zip(self.forward, self.backward, strict=True)]
        middle = statistics.median(totals)
        if len(totals) < 4 or middle == 0:
            return None
        low, _, high = statistics.quantiles(totals, n=4)
        return (high - low) / middle


@dataclass(frozen=True, slots=True)
class Windows:
    """The times of the same call in several windows of time."""

    times: tuple[Times, ...] = ()
    fastest: bool = True  # the fastest window counts, else the median one

    @property
    def counting(self) -> Times:
        """The window that counts: with the smallest median time, or the median of these."""
        ordered = sorted(self.times, key=lambda times: sum(times.medians))
        return ordered[0 if self.fastest else (len(ordered) - 1) // 2]

    @property
    def spread(self) -> float | None:
        """The spread of the window that counts, or of all windows together if that one has too few repetitions."""
        own = self.counting.spread
        if own is not None:
            return own
        forward = chain.from_iterable(times.forward for times in self.times)
        backward = chain.from_iterable(times.backward for times in self.times)
        return Times(tuple(forward), tuple(backward)).spread

    def with_another(self, times: Times) -> Windows:
        """Return these windows and one more."""
        return replace(self, times=(*self.times, times))


def repeat(
    once: Callable[[], tuple[float, float]],
    budget_seconds: float,
    fewest: int = 3,
    most: int = 15,
    expected_seconds: float = math.inf,
) -> Times:
    """Repeat a timed forward and backward until the budget is used, after one warm-up repetition.

    If the first takes longer than ``LONG_SECONDS``, and not much longer than expected, it counts, and is the only one.
    """
    forward, backward = list[float](), list[float]()
    first = once()
    if LONG_SECONDS < sum(first) < 2 * expected_seconds:
        return Times((first[0],), (first[1],))
    used = 0.0
    while len(forward) < most and (len(forward) < fewest or used < budget_seconds):
        f, b = once()
        forward.append(f)
        backward.append(b)
        used += f + b
    return Times(tuple(forward), tuple(backward))


class GpuLoad:
    """Keeps one GPU busy with matrix products and writes. Nothing reads their results."""

    def __init__(self, device: torch.device) -> None:
        cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or _UNKNOWN_CACHE_BYTES
        self._device = device
        self._written = torch.empty(2 * cache, dtype=torch.uint8, device=device)
        for side in _SIDES:
            self._matrix = torch.empty((side, side), dtype=torch.float16, device=device).normal_()
            self._product = torch.empty_like(self._matrix)
            self._seconds = self._timed()
            if self._seconds >= ENOUGH_SECONDS:
                break

    def _timed(self) -> float:
        self._multiply(WARM_UP)
        start, end = _event(), _event()
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


def _event() -> Any:
    """Return a CUDA event that records its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
