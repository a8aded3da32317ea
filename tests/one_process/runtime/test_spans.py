"""The timeline of a rank: times of the host on a CPU, of the device on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autopipe.ir.schedule import Instruction, Op
from autopipe.runtime.spans import CudaSpanRecorder, SpanRecorder, span_recorder


class Device:
    """A GPU that runs what is put into its queue when it is asked to synchronize, or one entry at a time."""

    def __init__(self) -> None:
        self.seconds, self.queue, self.synchronizations = 0.0, [], 0

    def take(self, seconds: float) -> None:
        self.queue.append(lambda: setattr(self, "seconds", self.seconds + seconds))

    def work(self, count: int) -> None:
        for run in self.queue[:count]:
            run()
        del self.queue[:count]

    def synchronize(self) -> None:
        self.synchronizations += 1
        self.work(len(self.queue))


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.seconds = device, None

    def record(self) -> None:
        self.device.queue.append(lambda: setattr(self, "seconds", self.device.seconds))

    def query(self) -> bool:
        return self.seconds is not None

    def elapsed_time(self, later: Event) -> float:
        assert self.seconds is not None and later.seconds is not None, "an event was read before it happened"
        return 1000 * (later.seconds - self.seconds)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(device))
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr("autopipe.runtime.spans.time", SimpleNamespace(perf_counter=lambda: 100.0))
    return device


def instruction(microbatch: int) -> Instruction:
    return Instruction(Op.FORWARD, 0, 0, microbatch)


def test_a_span_on_a_gpu_is_the_time_of_the_device(device: Device) -> None:
    recorder = span_recorder(1, torch.device("cuda"))
    for microbatch, seconds in enumerate((0.5, 0.25, 2.0)):
        with recorder.during(instruction(microbatch)):
            device.take(seconds)
    assert recorder.spans == []  # the device has not run anything, and nothing waits for it
    assert device.synchronizations == 1
    device.work(4)  # the origin, and the first instruction with its events
    with recorder.during(instruction(3)):
        device.take(1.0)
    assert [span.instruction.microbatch for span in recorder.spans] == [0]
    assert [(s.start_seconds, s.end_seconds) for s in recorder.finish()] == [
        (100.0, 100.5), (100.5, 100.75), (100.75, 102.75), (102.75, 103.75)
    ]  # fmt: skip
    assert [span.rank for span in recorder.spans] == [1] * 4
    assert recorder.finish() == recorder.spans


def test_a_span_on_a_cpu_is_the_time_of_the_call() -> None:
    recorder = span_recorder(0, torch.device("cpu"))
    assert type(recorder) is SpanRecorder and not isinstance(recorder, CudaSpanRecorder)
    with recorder.during(instruction(0)):
        pass
    (span,) = recorder.finish()
    assert 0 <= span.end_seconds - span.start_seconds < 10
