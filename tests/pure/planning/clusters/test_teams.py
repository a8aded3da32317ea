"""Clusters whose ranks are teams, and how a request for teams is compared with a stored one."""

import dataclasses

import pytest
from support.planning_cases import chain

from autopipe.commands.option_values import parsed
from autopipe.commands.options import model_settings
from autopipe.commands.planning.choose import cluster_of, ranks_of
from autopipe.commands.settings import AUTO_TEAM
from autopipe.commands.store import Work
from autopipe.errors import PlanError
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.profile import Device
from autopipe.ir.tensor import TensorSpec
from autopipe.options.commands import ProfileOptions
from autopipe.planning.requests import PlanRequest
from autopipe.planning.teams import of_teams, on_cluster

HOST, NETWORK = Level("host", 4, 100e9, 1e-6, 80e9), Level("network", 2, 10e9, 1e-5, 4e9)


def test_a_team_is_neighbours_of_the_innermost_level():
    cluster = of_teams(Cluster((HOST, NETWORK), (ClusterDevice("gpu"),), "file"), 2)
    assert (cluster.num_ranks, cluster.num_devices) == (4, 8)
    assert cluster.within == dataclasses.replace(HOST, count=2)
    # both members of a team send over the link of their host at once
    assert cluster.levels == (dataclasses.replace(HOST, count=2), Level("network", 2, 5e9, 1e-5, 2e9))


def test_a_team_may_take_a_whole_host_and_no_more():
    cluster = Cluster((HOST, NETWORK), (ClusterDevice("gpu"),), "file")
    assert of_teams(cluster, 4).levels[0].count == 1
    assert of_teams(cluster, 1) is cluster
    for size in (3, 8):
        with pytest.raises(PlanError, match=f"--tensor-parallel {size} does not divide the 4 devices of level 'host'"):
            of_teams(cluster, size)


def test_a_team_computes_as_its_slowest_device():
    devices = [ClusterDevice(f"gpu{i}", memory_bytes=(i + 1) * 2**30, speed=2.0 - i / 4) for i in range(4)]
    cluster = of_teams(Cluster((HOST,), tuple(devices), "file"), 2)
    assert [device.name for device in cluster.devices] == ["gpu1", "gpu3"]
    assert [cluster.memory_of(rank) for rank in range(2)] == [2**30, 3 * 2**30]


def test_devices_are_divided_into_teams(tmp_path):
    profile = dataclasses.replace(chain(4), device=Device("cpu", "some cpu", 8 * 2**30))
    profile = dataclasses.replace(profile, workload=dataclasses.replace(profile.workload, team=2))
    assert ranks_of(PlanRequest(gpus=6), profile) == 3
    cluster = cluster_of(PlanRequest(gpus=6), 3, profile, Work.begin(tmp_path, None))
    assert (cluster.num_ranks, cluster.num_devices) == (3, 6)
    with pytest.raises(PlanError, match="3 devices cannot be divided into teams of 2") as refused:
        ranks_of(PlanRequest(gpus=3), profile)
    assert "--gpus 2" in refused.value.remedy


def test_sums_over_a_team_take_time():
    """Forward and backward of an exchanging node take longer by a ring's time, whatever the speed of the device."""
    profile = chain(3)
    nodes = [*profile.graph.nodes]
    spec = TensorSpec(("s0", 100), "float32", requires_grad=True)
    nodes[1] = dataclasses.replace(nodes[1], kind="call_function", target="autopipe.team.summed_linear", spec=spec)
    nodes[2] = dataclasses.replace(nodes[2], kind="call_function", target="autopipe.team.entered", spec=spec)
    graph = dataclasses.replace(profile.graph, nodes=tuple(nodes))
    profile = dataclasses.replace(profile, graph=graph)
    cluster = of_teams(Cluster((HOST,), (ClusterDevice("gpu", speed=2.0),), "file"), 4)
    timed, size = on_cluster(profile, cluster), profile.measurements[0].microbatch_size
    before, after = profile.measurements[0].costs, timed.measurements[0].costs
    seconds = 2 * 3 / 4 * 400 * size / 80e9 + 2 * 3 * 1e-6
    first, second = nodes[1].name, nodes[2].name
    assert after[first].forward_seconds - before[first].forward_seconds == pytest.approx(2 * seconds)
    assert after[first].backward_seconds == before[first].backward_seconds
    assert after[second].forward_seconds == before[second].forward_seconds
    assert after[second].backward_seconds - before[second].backward_seconds == pytest.approx(2 * seconds)


def test_another_team_is_named_as_a_change_of_the_request():
    stored = PlanRequest(gpus=4, team=2)
    assert stored.overlaid(PlanRequest()) == stored
    assert stored.changes_to(stored.overlaid(PlanRequest(team=AUTO_TEAM))) == ("--tensor-parallel 2 -> auto",)


@pytest.mark.parametrize(("value", "team"), [("auto", AUTO_TEAM), (4, 4), (None, None)])
def test_the_option_is_a_number_or_auto(value, team):
    assert model_settings("net.py", parsed({"tensor_parallel": value}, ProfileOptions)).team == team


@pytest.mark.parametrize("value", [0, -1, 2.0, "two", True])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match="tensor_parallel must be 'auto' or a whole number of at least 1"):
        parsed({"tensor_parallel": value}, ProfileOptions)
