"""The clock of a GPU, on a virtual one: it must show the time that a call takes in the middle of a long training."""

from __future__ import annotations

import types

import pytest
import torch
from support.measuring.stacks import stack_of
from support.nccl.virtual_gpu import BOOST, VirtualGpu, virtual_gpu
from torch import nn

from autopipe.measure import measure
from autopipe.measure.clock import Clock, Times, Windows
from autopipe.measure.device import available_bytes, describe_device
from autopipe.measure.piece import StateCopies

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu():
    with virtual_gpu() as virtual:
        yield virtual


def hot(**options) -> Clock:
    clock = Clock(GPU, **options)
    clock.heat()
    return clock


def late(gpu: VirtualGpu, python: float, kernels: int, seconds: float):
    """Return a call that runs Python for some time before its first kernel."""

    def call():
        gpu.host += python
        for _ in range(kernels):
            gpu.kernel(seconds)

    return call


def test_the_time_of_a_call_does_not_contain_its_launch(gpu):
    _, seconds = hot().time(late(gpu, 200e-6, 10, 100e-6))
    assert seconds == pytest.approx(1000e-6)


def test_a_call_that_the_host_queues_slowly_takes_as_long_as_the_host(gpu):
    clock, call = hot(), late(gpu, 0.0, 100, 1e-6)
    assert clock.time(call)[1] == pytest.approx(500e-6)
    assert clock.time(call, kernels_only=True)[1] == pytest.approx(100e-6)


def test_the_gpu_is_occupied_as_long_as_the_host_needs(gpu):
    clock, call = hot(), late(gpu, 5e-3, 10, 100e-6)
    clock.time(call)
    assert clock.time(call, kernels_only=True)[1] == pytest.approx(1000e-6)


def test_a_call_that_waits_for_the_gpu_is_timed_without_the_work_before_it(gpu):
    def call():
        gpu.kernel(100e-6)
        gpu.synchronize()
        gpu.host += 50e-6
        gpu.kernel(100e-6)

    clock = hot()
    for _ in range(5):
        assert clock.time(call)[1] == pytest.approx(255e-6)  # with the launch of the second kernel


def test_times_are_those_of_a_hot_gpu(gpu):
    cold = Clock(GPU)
    assert cold.time(late(gpu, 0.0, 1, 1e-3))[1] == pytest.approx(BOOST * 1e-3)
    cold.heat()
    assert cold.time(late(gpu, 0.0, 1, 1e-3))[1] == pytest.approx(1e-3)


def test_a_repetition_does_not_find_its_data_in_the_cache(gpu):
    clock = hot()
    for _ in range(3):
        assert clock.time(lambda: gpu.kernel(1e-3, reads="weights"))[1] == pytest.approx(1e-3)


def test_the_load_needs_no_deterministic_algorithm_and_leaves_the_requirement(gpu, monkeypatch):
    required = []
    products = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda *a, **k: required.append(torch.are_deterministic_algorithms_enabled()) or products(*a, **k)
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        clock = hot()
        assert required and not any(required)
        clock.time(lambda: required.append(torch.are_deterministic_algorithms_enabled()))
        assert required[-1] and torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_median_window_of_a_gpu_counts_and_the_median_of_few_times():
    windows = Clock(GPU).windows()
    for seconds in (3.0, 1.0, 9.0):
        windows = windows.with_another(Times((seconds,), (seconds,)))
    assert windows.counting.medians == (3.0, 3.0)
    assert Windows(windows.times).counting.medians == (1.0, 1.0)
    assert Clock(GPU).typical((3.0, 1.0, 9.0)) == 3.0 and Clock(torch.device("cpu")).typical((3.0, 1.0)) == 1.0


def test_the_gpu_is_heated_before_the_first_window_and_between_windows(monkeypatch):
    heated = []
    monkeypatch.setattr(Clock, "heat", lambda clock, again=False: heated.append(again))
    _, capture, workload = stack_of()
    measure(capture, workload, device="cpu", microbatch_sizes=(2,))
    assert heated[0] is False and len(heated) > 1 and all(heated[1:])


def test_parameters_are_copied_once_for_a_segment_and_buffers_each_time():
    norm = nn.BatchNorm1d(4)
    state = StateCopies(nn.Sequential(norm), torch.device("cpu"))
    used = state.attribute("0")
    used(torch.randn(3, 4)).sum().backward()
    renewed = state.renewed(parameters=False).attribute("0")
    assert renewed.weight is used.weight and renewed.weight.grad is None
    assert renewed.running_mean.equal(norm.running_mean) and not used.running_mean.equal(norm.running_mean)
    assert state.renewed(parameters=True).attribute("0").weight is not used.weight


@pytest.mark.parametrize(
    ("count", "peers", "described"),
    [(8, {1, 2, 3, 4, 5, 6, 7}, (8, True)), (4, {1, 2}, (4, False)), (1, set(), (0, True))],
)
def test_a_profile_knows_the_gpus_of_its_host_and_whether_they_are_peers(monkeypatch, count, peers, described):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: other in peers)
    properties = types.SimpleNamespace(name="NVIDIA H200", total_memory=2**37)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = describe_device(GPU, 1)
    assert (device.name, device.memory_bytes) == ("NVIDIA H200", 2**37)
    assert (device.per_host, device.peer_access) == described


def test_memory_that_the_allocator_keeps_is_available(monkeypatch):
    """After the segments, most of a GPU is reserved, and the complete model fits all the same."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 500)
    assert available_bytes(GPU) == 1000 + 6500
