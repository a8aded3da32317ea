"""The figures of a link, from messages over one whose speed depends on their size, as NVLink's does."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

from autopipe.commands.calibration import link_ranks, links
from autopipe.commands.calibration.link_ranks import OVER_NCCL, THROUGH_HOST, figures_of
from autopipe.ir import artifact
from autopipe.ir.cluster import Level, Links, RuntimeOverhead
from autopipe.ir.profile import Device
from autopipe.planning.clusters import this_machine
from autopipe.report import plans

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


@pytest.fixture
def figures(monkeypatch):
    """Let all measurements return fixed figures."""
    within, between = Links("cpu", 1e-5, 3e9, 2e9), Level("measured hosts", 2, 1e9, 2e-5)
    monkeypatch.setattr(links, "measure_links", lambda kind: within)
    monkeypatch.setattr(links, "measure_overhead", lambda kind: RuntimeOverhead())
    monkeypatch.setattr(links, "measure_across", lambda kind, identity, settings: between)
    return within, between


def as_rank(monkeypatch, rank, *, local_world_size=1):
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", local_world_size)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")


def test_the_first_of_two_hosts_stores_the_link_between_them_and_later_measurements_keep_it(
    tmp_path, monkeypatch, figures
):
    within, between = figures
    stored = tmp_path / "links.json"
    as_rank(monkeypatch, 1)
    assert links.measure(tmp_path, "cpu") is None and not stored.exists()
    as_rank(monkeypatch, 0)
    measured = links.measure(tmp_path, "cpu")
    assert measured == dataclasses.replace(within, across=between) == artifact.load(Links, stored, renew="")
    assert "between two hosts: 20.0 us latency" in " ".join(plans.links(measured))
    as_rank(monkeypatch, 0, local_world_size=2)  # both on one host
    assert links.measure(tmp_path, "cpu") == measured
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert links.measure(tmp_path, "cpu") == measured


def test_a_plan_uses_the_measured_link_between_hosts(figures):
    within, between = figures
    measured = dataclasses.replace(within, device_kind="cuda", across=between)
    cluster = this_machine(8, Device("cuda", "A", 2**36, per_host=4), measured)
    assert cluster.levels == (measured.level(4), between)
