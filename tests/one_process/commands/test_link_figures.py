"""The figures of a link, from messages over one whose speed depends on their size, as NVLink's does."""

from __future__ import annotations

import types

import pytest
import torch

from autopipe.commands.calibration import link_ranks
from autopipe.commands.calibration.link_ranks import OVER_NCCL, THROUGH_HOST, figures_of

LATENCY, BANDWIDTH = 10e-6, 300e9


@pytest.fixture
def host(monkeypatch):
    """Measure on a clock that only messages advance."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(link_ranks, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def seconds(size: int) -> float:
    """Return the time of a message: below 16 MB, only a part of the link's channels carries it."""
    small = min(size, 16 * 2**20)
    return LATENCY + small / (BANDWIDTH / 8) + (size - small) / BANDWIDTH


def measured(host, sizes, device="cpu"):
    waited = []

    def ping(tensor):
        host.now += 2 * seconds(tensor.numel() * 4)

    def add_up(tensor):
        host.now += 2 * seconds(tensor.numel() * 4)

    transport = types.SimpleNamespace(barrier=lambda: waited.append(1))
    figures = figures_of(ping, add_up, torch.device(device), transport, sizes)
    assert len(waited) == 5
    return figures


def test_messages_over_nccl_are_large_enough_for_the_bandwidth_of_nvlink(host):
    figures = measured(host, OVER_NCCL)
    assert figures["latency_seconds"] == pytest.approx(LATENCY, rel=0.01)
    assert figures["bandwidth"] == pytest.approx(BANDWIDTH, rel=0.2)
    assert figures["all_reduce_bandwidth"] == pytest.approx(BANDWIDTH / 2, rel=0.2)
    assert measured(host, THROUGH_HOST)["bandwidth"] < BANDWIDTH / 7  # why the host's sizes do not do
