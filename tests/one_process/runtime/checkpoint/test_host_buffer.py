"""Page-locked memory is locked in the size that is needed, unlocked at the end, and optional."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from support.models.weights import pipeline
from support.nccl.synchronizations import counted
from support.pipelines import minibatches

from autopipe.runtime.checkpoint import host_buffer
from autopipe.runtime.checkpoint.host_buffer import HostBuffer
from autopipe.runtime.checkpoint.manifest import Manifest
from autopipe.runtime.checkpoint.saver import Saver
from autopipe.runtime.checkpoint.snapshot import Snapshot


class Cudart:
    """Stands in for the CUDA runtime, and keeps what is locked: pointer -> size."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.sizes: list[int] = []
        self.code = 0
        self.discarded = 0

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        assert size > 0 and flags == 0
        if self.code:
            return self.code
        assert not any(begin < pointer + size and pointer < begin + of for begin, of in self.locked.items())
        self.locked[pointer] = size
        self.sizes.append(size)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.locked[pointer]
        return 0

    def discard(self) -> None:
        self.discarded += 1


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    fake = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(host_buffer, "_discard_last_error", fake.discard)
    return fake


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, 5 * 2**20 + 3])
def test_only_the_pages_of_the_buffer_are_locked(num_bytes: int, cudart: Cudart) -> None:
    buffer = HostBuffer(num_bytes, pinned=True)
    assert buffer.pinned and buffer.bytes.numel() == num_bytes
    ((pointer, size),) = cudart.locked.items()
    assert pointer == buffer.bytes.data_ptr() and pointer % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
    assert num_bytes <= size < num_bytes + mmap.PAGESIZE
    # all of it is in the tensor's own memory
    storage = buffer.bytes.untyped_storage()
    assert storage.data_ptr() <= pointer and pointer + size <= storage.data_ptr() + storage.nbytes()
    assert storage.nbytes() <= size + mmap.PAGESIZE


def test_a_buffer_is_unlocked_when_it_is_released_or_collected(cudart: Cudart) -> None:
    released, collected = HostBuffer(100, pinned=True), HostBuffer(200, pinned=True)
    assert len(cudart.locked) == 2
    released.release()
    assert not released.pinned and len(cudart.locked) == 1
    released.release()
    del collected
    gc.collect()
    assert cudart.locked == {}


def test_an_empty_or_ordinary_buffer_is_not_locked(cudart: Cudart) -> None:
    for buffer in (HostBuffer(0, pinned=True), HostBuffer(100)):
        assert (buffer.pinned, buffer.refusal) == (False, "")
    assert cudart.sizes == []


def test_a_buffer_that_cannot_be_locked_is_ordinary_memory(cudart: Cudart) -> None:
    cudart.code = 2
    buffer = HostBuffer(2**20, pinned=True)
    assert (buffer.pinned, buffer.bytes.numel(), cudart.discarded) == (False, 2**20, 1)
    assert "cannot lock" in buffer.refusal and "cudaHostRegister: error 2" in buffer.refusal
    buffer.release()


def test_a_snapshot_locks_a_larger_buffer_in_place_of_the_old_one(cudart: Cudart, tmp_path: Path) -> None:
    snapshot = Snapshot(pinned=True)
    for count in (3, 5000, 7000, 10):
        weights = {"w": torch.randn(count), "n": torch.tensor(count)}
        snapshot.take(weights)
        assert len(cudart.locked) == 1
        snapshot.write(tmp_path / "file")
        read = load_file(tmp_path / "file")
        assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())
    assert [size // mmap.PAGESIZE for size in cudart.sizes] == [1, 5, 7]
    del snapshot
    gc.collect()
    assert cudart.locked == {}


class Event:
    """Stands in for a CUDA event: when it was recorded, and whether someone waited for it."""

    all: ClassVar[list[Event]] = []

    def __init__(self) -> None:
        self.recorded = self.waited = False
        Event.all.append(self)

    def record(self, stream: Any) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded
        self.waited = True


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    monkeypatch.setattr(Event, "all", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Event.all


def test_training_does_not_wait_for_the_copy_of_a_gpu_but_the_writing_does(cudart, events, tmp_path) -> None:
    with counted() as mode:
        weights = {"w": torch.empty(1000, device="cuda"), "n": torch.ones(3)}
        snapshot = Snapshot(pinned=True)
        snapshot.take(weights)
        assert [event.waited for event in events] == [False] and not mode.counts["synchronize"]
        snapshot.write(tmp_path / "file")
        assert events[0].waited
        snapshot.take(weights)
        assert [event.waited for event in events] == [True, False]


def test_the_pages_of_a_buffer_stay_locked_while_a_gpu_copies_into_it(cudart, events) -> None:
    for end in (HostBuffer.release, lambda buffer: None):
        buffer = HostBuffer(100, pinned=True)
        copied = Event()
        copied.record(None)
        buffer.copies_end_with(copied)
        end(buffer)
        del buffer
        gc.collect()
        assert copied.waited and cudart.locked == {}


def test_a_saver_reports_once_that_copies_are_not_page_locked(cudart: Cudart, tmp_path: Path) -> None:
    cudart.code = 2
    built = pipeline(tmp_path, 1)
    (session,) = built.train(minibatches(built.captured.workload, 1, 8))
    saver = Saver(tmp_path / "checkpoints", (1,), keep=0, leads=True)
    saver.watch(session.executor.stepper)
    for step in (1, 2):
        saver.save(Manifest(step, 0, step, 0, "g", "p", ()), session.executor.stepper, {0: 0}, pinned=True)
        saver.wait()
    assert [reason.split(" (")[1] for reason in saver.refusals()] == ["cudaHostRegister: error 2)"]
    assert saver.refusals() == [] and len(saver.finished()) == 2
