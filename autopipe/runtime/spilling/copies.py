"""Copies between host and device that overlap with computation, in two lanes: one for each direction.

On a CUDA device a lane is a stream. On a CPU, where a budget takes the place of the device, it is a thread.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from autopipe.ir.schedule import Instruction
from autopipe.ir.timeline import Span
from autopipe.runtime.spans import SpanRecorder

Pair = tuple[torch.Tensor, torch.Tensor]
"""(target, source), of equal dtype and length, each contiguous in one dimension."""


class Done(Protocol):
    """The end of a copy."""

    def wait(self) -> None:
        """Let the computation that follows wait for it."""

    def synchronize(self) -> None:
        """Let the calling thread wait for it."""

    def has_ended(self) -> bool:
        """Return whether the copy has ended."""


class Lane(Protocol):
    """Makes copies one after the other."""

    num_bytes: int  # copied so far

    def copy(self, instruction: Instruction, pairs: Sequence[Pair], after: Sequence[Done]) -> Done:
        """Begin to copy, when the copies ``after`` have ended and what was computed so far is there."""

    def close(self) -> None:
        """End the copies that have begun."""


def lane_of(device: torch.device, recorder: SpanRecorder | None) -> Lane:
    """Return a lane between the host and a device. ``recorder``: takes the times of the copies."""
    return StreamLane(device, recorder) if device.type == "cuda" else ThreadLane(recorder)


def copy_memory(pairs: Sequence[Pair]) -> None:
    """Copy on the host. Other threads run meanwhile."""
    for target, source in pairs:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


class ThreadLane:
    """A lane that is a thread.

    ``copy``: copies some pairs; a test may replace it by one that takes a given time.
    """

    def __init__(self, recorder: SpanRecorder | None, copy: Callable[[Sequence[Pair]], None] = copy_memory) -> None:
        self.num_bytes = 0
        self._recorder, self._copy = recorder, copy
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="autopipe-copies")

    def copy(self, instruction: Instruction, pairs: Sequence[Pair], after: Sequence[Done]) -> Done:
        """Begin to copy; see ``Lane``."""
        self.num_bytes += _size(pairs)
        copied = list(pairs)

        def run() -> None:
            for done in after:
                done.synchronize()
            begin = time.perf_counter()
            self._copy(copied)
            copied.clear()  # the memory of the source is free before the end is announced
            if self._recorder is not None:
                self._recorder.spans.append(Span(self._recorder.rank, instruction, begin, time.perf_counter()))

        return _FutureDone(self._thread.submit(run))

    def close(self) -> None:
        """End the copies that have begun."""
        self._thread.shutdown()


class _FutureDone:
    def __init__(self, future: concurrent.futures.Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def synchronize(self) -> None:
        self._future.result()

    def has_ended(self) -> bool:
        return self._future.done()


class StreamLane:
    """A lane that is a stream of a CUDA device."""

    def __init__(self, device: torch.device, recorder: SpanRecorder | None) -> None:
        self.num_bytes = 0
        self._recorder = recorder
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch

    def copy(self, instruction: Instruction, pairs: Sequence[Pair], after: Sequence[Done]) -> Done:
        """Begin to copy; see ``Lane``."""
        self.num_bytes += _size(pairs)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for done in after:
                done.wait()
            timed = self._recorder.during(instruction) if self._recorder else None
            if timed is not None:
                timed.__enter__()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                for tensor in (target, source):
                    if tensor.is_cuda:
                        tensor.record_stream(self._stream)
            if timed is not None:
                timed.__exit__(None, None, None)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
            event.record()
        return _EventDone(event)

    def close(self) -> None:
        """End the copies that have begun."""
        self._stream.synchronize()


class _EventDone:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

    def has_ended(self) -> bool:
        return bool(self._event.query())


def _size(pairs: Sequence[Pair]) -> int:
    return sum(source.nbytes for _, source in pairs)
