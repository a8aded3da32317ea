"""Records when each instruction ran, for ``--timeline``."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from autopipe.ir.schedule import Instruction
from autopipe.ir.timeline import Span


@dataclass(slots=True)
class SpanRecorder:
    """Times instructions on a CPU, where an instruction has run when its call returns."""

    rank: int
    spans: list[Span] = field(default_factory=list)  # start and end in seconds of the monotonic clock

    @contextlib.contextmanager
    def during(self, instruction: Instruction) -> Iterator[None]:
        """Record the time of an instruction."""
        start = time.perf_counter()
        yield
        self.spans.append(Span(self.rank, instruction, start, time.perf_counter()))

    def finish(self) -> list[Span]:
        """Return the spans of everything recorded."""
        return self.spans


@dataclass(slots=True)
class CudaSpanRecorder(SpanRecorder):
    """Times instructions on a GPU, which runs them later than the host starts them.

    Two events in the current stream enclose what an instruction starts there. Waiting for a message is a part of its
    receive; a send, which runs on a stream of NCCL, takes no time. Only the first instruction synchronizes.
    """

    _origin: tuple[float, Any] | None = None  # a moment on the monotonic clock, and an event of the same moment
    _running: deque[tuple[Instruction, Any, Any]] = field(default_factory=deque)  # with the events of start and end

    @contextlib.contextmanager
    def during(self, instruction: Instruction) -> Iterator[None]:
        """Record the time of an instruction."""
        if self._origin is None:
            origin = _event()
            torch.cuda.synchronize()
            origin.record()
            self._origin = time.perf_counter(), origin
        start, end = _event(), _event()
        start.record()
        yield
        end.record()
        self._running.append((instruction, start, end))
        while self._running and self._running[0][2].query():  # events of a long run do not accumulate
            self._read()

    def finish(self) -> list[Span]:
        """Wait for the GPU, and return the spans of everything recorded."""
        if self._running:
            torch.cuda.synchronize()
        while self._running:
            self._read()
        return self.spans

    def _read(self) -> None:
        assert self._origin is not None
        instruction, start, end = self._running.popleft()
        seconds, origin = self._origin
        times = (seconds + origin.elapsed_time(event) / 1000 for event in (start, end))
        self.spans.append(Span(self.rank, instruction, *times))


def span_recorder(rank: int, device: torch.device) -> SpanRecorder:
    """Return the recorder for the device on which a rank computes."""
    return (CudaSpanRecorder if device.type == "cuda" else SpanRecorder)(rank)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
