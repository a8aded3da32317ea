"""The devices of a sweep: GPUs by index, or processes on a CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

from autopipe.errors import RunError
from autopipe.sweep import devices
from autopipe.sweep.devices import Devices, as_visible, find_devices
from autopipe.sweep.file import SweepJob


def job(**options: Any) -> SweepJob:
    return SweepJob(1, "gpt", "job[0]", "gpt.py", options, {})


def test_a_cpu_has_a_device_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_gpus", lambda: 0)
    cores = len(os.sched_getaffinity(0))
    assert find_devices(None, [job()], "") == Devices(tuple(range(cores)), False)
    assert find_devices(3, [job(gpus=3)], "") == Devices((0, 1, 2), False)
    assert find_devices((1, 5), [job()], "").visible((1,)) == ()


def test_gpus_are_found_unless_all_jobs_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_gpus", lambda: 4)
    assert find_devices(None, [job(), job(device="cpu")], "") == Devices((0, 1, 2, 3), True)
    assert find_devices((3, 1), [job()], "").visible((1, 3)) == (1, 3)
    assert not find_devices(2, [job(device="cpu")], "").are_gpus
    with pytest.raises(RunError, match="there is no GPU 4 on this machine; it has 4 GPUs"):
        find_devices((0, 4), [job()], "")


def test_a_job_cannot_need_more_devices_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_gpus", lambda: 4)
    with pytest.raises(RunError, match="gpt needs 3 devices, and the sweep has 2") as caught:
        find_devices((0, 1), [job(gpus=3)], "sweep.toml")
    assert caught.value.where == "sweep.toml: job[0].gpus"


def test_a_process_sees_its_gpus_only() -> None:
    assert as_visible((2, 0), "") == "2,0"
    assert as_visible((1,), "4, 6,7") == "6"
    assert as_visible((0, 1), "GPU-aa,GPU-bb") == "GPU-aa,GPU-bb"
