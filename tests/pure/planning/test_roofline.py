"""A profile of a device without a datasheet, converted to a device with one: formula, cluster files, refusals."""

import dataclasses

import pytest
from support.planning_cases import chain

from autopipe.errors import PlanError
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.profile import Device, NodeWork, PassWork
from autopipe.planning.clusters import by_datasheet, cluster_of_figures, parse_cluster, with_estimated_times
from autopipe.planning.cost.datasheets import COMPUTE_EFFICIENCY, datasheet, describe, on_datasheet

CPU = Device("cpu", "some cpu", 8 * 2**30)
A100 = Device("cuda", "NVIDIA A100-SXM4-80GB", 80 * 10**9)
H100 = datasheet("H100-SXM")


def counted(work, device=CPU):
    """Return a profile of four equal layers with 256 MiB of weights and the given work at each microbatch size."""
    profile = dataclasses.replace(chain(4), device=device)
    measurements = tuple(
        dataclasses.replace(m, work={name: work(m.microbatch_size) for name in m.costs}) for m in profile.measurements
    )
    return dataclasses.replace(profile, measurements=measurements)


def only_compute(size):
    return NodeWork(PassWork(10**12 * size, 8, 0), PassWork(2 * 10**12 * size, 8, 0))


def cost_of(profile, size):
    return next(m for m in profile.measurements if m.microbatch_size == size).costs["layer0"]


def test_a_compute_bound_node_runs_at_a_part_of_the_peak():
    cost = cost_of(on_datasheet(counted(only_compute), H100, "bf16"), 2)
    assert cost.forward_seconds == pytest.approx(2e12 / (COMPUTE_EFFICIENCY * 989.5e12))
    # the backward adds the gradient of 256 MiB of weights: two reads, one write
    assert cost.backward_seconds == pytest.approx(4e12 / (COMPUTE_EFFICIENCY * 989.5e12) + 3 * 2**28 / 3350e9)
    slower = cost_of(on_datasheet(counted(only_compute), H100, "fp32"), 2)
    assert slower.forward_seconds == pytest.approx(cost.forward_seconds * 989.5 / 67)


def test_a_memory_bound_node_runs_at_the_bandwidth():
    cost = cost_of(on_datasheet(counted(lambda size: NodeWork(PassWork(1, 10**9, 10**9 * size))), H100, "bf16"), 4)
    assert cost.forward_seconds == pytest.approx(5e9 / 3350e9)


def test_bytes_are_unchanged_and_the_optimizer_is_memory_bound():
    profile = counted(only_compute)
    estimated = on_datasheet(profile, H100, "bf16")
    before, after = cost_of(profile, 1), cost_of(estimated, 1)
    assert (after.saved_bytes, after.output_bytes) == (before.saved_bytes, before.output_bytes)
    assert estimated.optimizer_bytes_per_byte == profile.optimizer_bytes_per_byte == 2
    # AdamW reads parameter, gradient and two moments, and writes parameter and moments
    assert estimated.optimizer_seconds_per_byte == pytest.approx(7 / 3350e9)
    assert estimated.device.memory_bytes == 80 * 10**9


def test_a_profile_of_a_cpu_is_converted_to_the_named_device():
    profile = counted(only_compute)
    cluster = cluster_of_figures(4, profile, None, 5e10, "H100-SXM")
    device = cluster.device(3)
    assert (device.name, device.memory_bytes, device.speed) == ("H100-80GB", 80 * 10**9, 1.0)
    assert cluster.source == describe(H100, "fp32", "some cpu")
    assert "estimate, without measurements on such a device: operations and bytes counted on some cpu" in cluster.source
    # the runtime overhead of this machine is not that of the device
    assert cluster.host.step_seconds == cluster.host.compute_seconds == 0
    once = with_estimated_times(profile, cluster)
    assert once == on_datasheet(profile, H100, "fp32")
    assert with_estimated_times(once, cluster) == once


def test_a_profile_of_a_device_with_a_datasheet_keeps_its_measured_times():
    profile = counted(only_compute, A100)
    cluster = cluster_of_figures(4, profile, None, None, "H100-SXM")
    assert with_estimated_times(profile, cluster) is profile
    assert cluster.source.startswith("estimate from datasheets: 2.38 times the speed of A100-80GB")


def test_a_profile_without_counts_is_refused():
    profile = dataclasses.replace(chain(4), device=CPU)
    with pytest.raises(PlanError, match="has no counts of operations and bytes") as caught:
        with_estimated_times(profile, cluster_of_figures(2, profile, None, None, "H100-SXM"))
    assert caught.value.remedy == "profile the model again: autopipe profile TARGET"


LEVELS = [{"count": 8, "bandwidth": "450GB/s"}, {"count": 2, "bandwidth": "400Gbit/s"}]


def test_a_cluster_file_names_a_datasheet():
    profile = counted(only_compute)
    cluster = by_datasheet(parse_cluster({"level": LEVELS, "device": {"datasheet": "H100-SXM"}}, "here"), profile)
    assert cluster.num_ranks == 16
    assert cluster.device(15) == ClusterDevice("H100-80GB", 80 * 10**9, 1.0, 1.0, "H100-80GB", 50e9)
    assert cost_of(with_estimated_times(profile, cluster), 1) == cost_of(on_datasheet(profile, H100, "fp32"), 1)
    less = parse_cluster({"level": LEVELS, "device": {"datasheet": "H100-SXM", "memory": "40GiB"}}, "here")
    assert less.device(0).memory_bytes == 40 * 2**30


def test_speeds_of_unequal_devices_are_relative_to_the_first():
    profile = counted(only_compute)
    devices = [{"datasheet": "H100-80GB", "count": 8}, {"datasheet": "A100-80GB", "count": 8}]
    cluster = by_datasheet(parse_cluster({"level": LEVELS, "device": devices}, "here"), profile)
    assert cluster.device(0).speed == 1.0
    assert cluster.device(8).speed == pytest.approx((19.5 / 67 * 2039 / 3350) ** 0.5)
    assert cluster.device(8).update_speed == pytest.approx(2039 / 3350)


def test_keys_that_contradict_a_datasheet_are_refused():
    with pytest.raises(PlanError, match="datasheet and speed exclude each other"):
        parse_cluster({"level": LEVELS, "device": {"datasheet": "H100-SXM", "speed": 2}}, "here")
    with pytest.raises(PlanError, match="unknown device 'H100-SX'"):
        parse_cluster({"level": LEVELS, "device": {"datasheet": "H100-SX"}}, "here")
    mixed = Cluster((Level("l", 2, 1e9, 0.0),), (ClusterDevice("a", datasheet="H100-80GB"), ClusterDevice("b")), "x")
    with pytest.raises(PlanError, match="some devices of the cluster have a datasheet and others a speed"):
        by_datasheet(mixed, counted(only_compute))
    volta = cluster_of_figures(2, counted(only_compute), None, None, "V100")
    autocast = dataclasses.replace(counted(only_compute).workload, precision="bf16")
    with pytest.raises(PlanError, match="no bf16 matrix units"):
        with_estimated_times(dataclasses.replace(counted(only_compute), workload=autocast), volta)
