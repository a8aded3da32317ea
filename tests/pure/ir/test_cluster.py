"""Clusters: values out of range are refused, and figures of groups of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from autopipe.ir.cluster import MOST_RANKS, Cluster, ClusterDevice, Level, Links, RuntimeOverhead

NODE, WORLD = Level("node", 2, 1e10, 1e-6), Level("world", 3, 1e9, 1e-5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Level("node", 0, 1e9, 0.0), "level 'node': count must be from 1 to"),
        (lambda: Level("node", 2, 0.0, 0.0), "level 'node': bandwidth must be above 0 and finite, and is 0.0"),
        (lambda: Level("node", 2, 1e9, -1.0), "level 'node': latency_seconds must be 0 or more"),
        (lambda: Level("node", 2, 1e9, 0.0, math.inf), "level 'node': all_reduce_bandwidth must be 0 or more"),
        (lambda: ClusterDevice("v", speed=0.0), "device 'v': speed must be above 0 and finite, and is 0.0"),
        (lambda: ClusterDevice("v", memory_speed=math.nan), "device 'v': memory_speed must be 0 or more"),
        (lambda: ClusterDevice("v", memory_bytes=-1), "device 'v': memory_bytes must be from 0"),
        (lambda: RuntimeOverhead(step_seconds=-1.0), "the overhead of the runtime must be finite and at least 0"),
        (lambda: RuntimeOverhead(pace=0.5), "must be finite and at least 1, and is 0.5"),
        (lambda: Links("cpu", 1e-6, 0.0, 1e9), "links need bandwidths above 0"),
        (lambda: Links("cpu", -1.0, 1e9, 1e9), "links need bandwidths above 0"),
        (lambda: Links("tpu", 1e-6, 1e9, 1e9), "links between 'tpu' devices; known: cpu, cuda"),
        (lambda: Cluster((), (ClusterDevice("v"),), "test"), "at least one level and one device"),
        (lambda: Cluster((NODE,), (), "test"), "at least one level and one device"),
        (
            lambda: Cluster((Level("a", MOST_RANKS, 1e9, 0.0), Level("b", 2, 1e9, 0.0)), (ClusterDevice("v"),), "test"),
            "a cluster has at most",
        ),
        (lambda: Cluster((NODE,), (ClusterDevice("v"),) * 3, "test"), "3 devices for 2 ranks"),
    ],
)
def test_a_value_out_of_range_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_the_slowest_rank_decides_the_speed_of_a_group() -> None:
    devices = ClusterDevice("fast", 8, 4.0, 2.0), ClusterDevice("slow", 4, 1.0)
    cluster = Cluster((NODE,), devices, "test")
    assert (cluster.speed_of((0,)), cluster.speed_of((0, 1))) == (4.0, 1.0)
    assert (cluster.update_speed_of((0,)), cluster.update_speed_of((0, 1))) == (2.0, 1.0)
    assert [cluster.memory_of(rank) for rank in (0, 1, 2)] == [8, 4, 0]
    assert Cluster((NODE,), devices[:1], "test").memory_of(7) == 8


def test_a_link_is_the_innermost_level_of_both_ranks() -> None:
    cluster = Cluster((NODE, WORLD), (ClusterDevice("v"),), "test")
    assert cluster.num_ranks == 6
    assert [cluster.link(0, rank) for rank in (1, 2, 5)] == [NODE, WORLD, WORLD]
    assert cluster.link(0, 6) == WORLD  # beyond the described ranks


def test_measured_links_are_a_level() -> None:
    level = Links("cpu", 1e-6, 1e9, 5e8).level(4)
    assert (level.count, level.bandwidth, level.ring_bandwidth) == (4, 1e9, 5e8)
    assert NODE.ring_bandwidth == NODE.bandwidth
