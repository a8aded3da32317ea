"""One clock for CPU and GPU, and the median of repeated calls, taken in several windows of time.

On a GPU: CUDA events around the call. On a CPU with one thread: the CPU time of that thread (autograd runs the backward
of CPU tensors in it), which other programs on the machine do not lengthen; how much they would have is ``stolen``. With
more threads: wall-clock time.

A core that is shared with another machine's work is half as fast for seconds at a time, longer than anything here is
repeated. So everything is measured in several windows, far apart, and the quietest one counts.
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
    """Times calls on one device. ``wall_seconds``, ``own_seconds``: sums, to tell how busy the machine was."""

    device: torch.device
    threads: int = 1
    wall_seconds: float = field(default=0.0, init=False)
    own_seconds: float = field(default=0.0, init=False)

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
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own gap
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)
        stream = torch.cuda.current_stream(self.device)
        start.record(stream)
        result = call()
        end.record(stream)
        end.synchronize()
        return result, float(start.elapsed_time(end)) / 1e3

    @property
    def stolen(self) -> float:
        """The part of the time in which other programs ran instead, 0 .. 1; 0 where it cannot be told."""
        if self.device.type == "cuda" or self.threads != 1 or not self.wall_seconds:
            return 0.0
        return max(1 - self.own_seconds / self.wall_seconds, 0.0)


@dataclass(frozen=True, slots=True)
class Times:
    """Repeated forwards and backwards of one thing, in seconds."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @property
    def medians(self) -> tuple[float, float]:
        """The median forward and the median backward."""
        return statistics.median(self.forward), statistics.median(self.backward)

    @property
    def spread(self) -> float | None:
        """The interquartile range of forward plus backward, relative to the median; None for fewer than four."""
        totals = [f + b for f, b in zip(self.forward, self.backward, strict=True)]
        middle = statistics.median(totals)
        if len(totals) < 4 or middle == 0:
            return None
        low, _, high = statistics.quantiles(totals, n=4)
        return (high - low) / middle


@dataclass(frozen=True, slots=True)
class Windows:
    """The same thing measured again later, and again."""

    found: tuple[Times, ...] = ()

    @property
    def quietest(self) -> Times:
        """The window that took least."""
        return min(self.found, key=lambda times: sum(times.medians))

    @property
    def spread(self) -> float | None:
        """The spread of the quietest window; where it has too few repetitions, that of all."""
        own = self.quietest.spread
        if own is not None:
            return own
        forward = chain.from_iterable(times.forward for times in self.found)
        backward = chain.from_iterable(times.backward for times in self.found)
        return Times(tuple(forward), tuple(backward)).spread

    def with_another(self, times: Times) -> Windows:
        """Return these and one more."""
        return Windows((*self.found, times))


def repeat(once: Callable[[], tuple[float, float]], budget_seconds: float, fewest: int = 3, most: int = 15) -> Times:
    """Repeat a timed forward and backward, after one to warm up, until the budget is used."""
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
