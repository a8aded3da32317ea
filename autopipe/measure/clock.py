"""One clock for CPU and GPU, and medians of repeated calls in several windows of time.

- GPU: CUDA events around the call.
- CPU with one thread: the CPU time of that thread, which also runs the backward of CPU tensors. Other programs on the
  machine do not lengthen it; ``steal_time`` tells how much time they took.
- CPU with more threads: wall-clock time.

A core that is shared with another virtual machine can run at half speed for seconds, longer than any series of
repetitions here. Everything is therefore measured in several windows, far apart, and the fastest window counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch


@dataclass
class Clock:
    """Times calls on one device."""

    device: torch.device
    threads: int = 1
    wall_seconds: float = field(default=0.0, init=False)  # sum over all calls, on a CPU
    own_seconds: float = field(default=0.0, init=False)  # CPU time of this thread in all calls

    def time(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Return the result of a call and its seconds."""
        if self.device.type == "cuda":
            return self._time_cuda(call)
        own, wall = time.thread_time_ns(), time.perf_counter_ns()
        result = call()
        wall, own = time.perf_counter_ns() - wall, time.thread_time_ns() - own
        self.wall_seconds += wall / 1e9
        self.own_seconds += own / 1e9
        return result, (own if self.threads == 1 else wall) / 1e9

    def _time_cuda(self, call: Callable[[], Any]) -> tuple[Any, float]:
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)
        stream = torch.cuda.current_stream(self.device)
        start.record(stream)
        result = call()
        end.record(stream)
        end.synchronize()
        return result, float(start.elapsed_time(end)) / 1e3

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

    @property
    def fastest_window(self) -> Times:
        """The window with the smallest median time."""
        return min(self.times, key=lambda times: sum(times.medians))

    @property
    def spread(self) -> float | None:
        """The spread of the fastest window, or of all windows together if that one has too few repetitions."""
        own = self.fastest_window.spread
        if own is not None:
            return own
        forward = chain.from_iterable(times.forward for times in self.times)
        backward = chain.from_iterable(times.backward for times in self.times)
        return Times(tuple(forward), tuple(backward)).spread

    def with_another(self, times: Times) -> Windows:
        """Return these windows and one more."""
        return Windows((*self.times, times))


def repeat(once: Callable[[], tuple[float, float]], budget_seconds: float, fewest: int = 3, most: int = 15) -> Times:
    """Repeat a timed forward and backward until the budget is used, after one warm-up repetition."""
    once()
    forward: list[float] = []
    backward: list[float] = []
    used = 0.0
    while len(forward) < most and (len(forward) < fewest or used < budget_seconds):
        f, b = once()
        forward.append(f)
        backward.append(b)
        used += f + b
    return Times(tuple(forward), tuple(backward))
