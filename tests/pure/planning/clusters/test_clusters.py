"""Clusters without a file, and a request compared with a stored one."""

import dataclasses

import pytest
from support.planning_cases import chain

from autopipe.commands.planning.request import request_of
from autopipe.commands.settings import ClusterSettings, ModelSettings, PlanSettings, ProfileSettings
from autopipe.errors import PlanError
from autopipe.ir.cluster import Links
from autopipe.ir.profile import Device
from autopipe.planning.clusters import by_datasheet, cluster_of_figures, precision_of, this_machine, usable_gpu_bytes
from autopipe.planning.teams import of_teams

CPU = Device("cpu", "some cpu", 8 * 2**30)
A100 = Device("cuda", "NVIDIA A100-SXM4-80GB", 80 * 10**9)
CPU_PROFILE = dataclasses.replace(chain(4), device=CPU)


def test_given_figures_replace_those_of_this_machine():
    cluster = cluster_of_figures(4, CPU_PROFILE, 2**30, 3.125e9)
    assert cluster.num_ranks == 4
    assert cluster.levels[0].bandwidth == 3.125e9
    assert cluster.device(3).memory_bytes == 2**30
    assert cluster.source == "command line"


def test_cpu_ranks_share_the_memory_of_this_machine():
    two, four = this_machine(2, CPU), this_machine(4, CPU)
    assert two.source == "assumed"
    assert 0 < four.device(0).memory_bytes < two.device(0).memory_bytes


def test_cpu_ranks_share_the_cores_of_this_machine(monkeypatch):
    monkeypatch.setattr("autopipe.planning.clusters.usable_cores", lambda: 4)
    assert this_machine(4, CPU).cores == 0
    assert this_machine(5, CPU).cores == 4
    assert this_machine(3, dataclasses.replace(CPU, threads=3)).cores == pytest.approx(4 / 3)
    assert this_machine(2, dataclasses.replace(CPU, threads=8)).cores == 1
    assert of_teams(this_machine(8, CPU), 2).cores == 2
    assert cluster_of_figures(8, CPU_PROFILE, 2**30, None).cores == 4
    assert cluster_of_figures(8, CPU_PROFILE, None, 1e9).cores == 0  # a link to other hosts
    assert this_machine(8, A100).cores == 0


def test_a_gpu_has_the_profiled_memory():
    total = 5 * 2**30
    assert this_machine(2, Device("cuda", "H", total)).device(1).memory_bytes == usable_gpu_bytes(total)
    assert usable_gpu_bytes(total) == round(0.92 * total) - 2**30
    assert usable_gpu_bytes(2**29) == 1  # 0 would be no limit


@pytest.mark.parametrize(
    ("name", "peer_access", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", True, 225e9),
        ("NVIDIA A100-SXM4-80GB", True, 150e9),
        ("NVIDIA A100-PCIE-40GB", True, 16e9),  # the same chip without NVLink
        ("NVIDIA GeForce RTX 4090", True, 16e9),
        ("NVIDIA GeForce RTX 4090", False, 8e9),
        ("NVIDIA L40S", True, 16e9),
    ],
)
def test_the_first_guess_of_a_link_depends_on_the_device_and_on_peer_access(name, peer_access, bandwidth):
    device = Device("cuda", name, 2**36, peer_access=peer_access)
    (level,) = this_machine(4, device).levels
    assert level.bandwidth == bandwidth


@pytest.mark.parametrize(
    ("per_host", "ranks", "counts"),
    [(0, 8, [8]), (0, 16, [8, 2]), (4, 8, [4, 2]), (8, 12, [6, 2]), (2, 2, [2]), (8, 11, [1, 11])],
)
def test_ranks_beyond_a_host_are_behind_a_network(per_host, ranks, counts):
    cluster = this_machine(ranks, dataclasses.replace(A100, per_host=per_host))
    assert [level.count for level in cluster.levels] == counts and cluster.num_ranks == ranks
    if len(counts) == 2:
        assert cluster.link(0, counts[0]).bandwidth == 10e9 < cluster.levels[0].bandwidth


def test_hosts_are_added_to_measured_links_and_to_datasheets():
    links = Links("cuda", 1e-5, 2e11, 1e11)
    cluster = this_machine(16, A100, links)
    assert cluster.source == "measured" and cluster.levels[0] == links.level(8)
    assert [(level.count, level.bandwidth) for level in cluster.levels[1:]] == [(2, 10e9)]
    named = cluster_of_figures(16, CPU_PROFILE, None, None, "H100-SXM")
    assert [(level.count, level.bandwidth) for level in named.levels] == [(8, 225e9), (2, 10e9)]
    assert cluster_of_figures(16, CPU_PROFILE, None, 5e10, "H100-SXM").levels[0].count == 16
    memory = cluster_of_figures(16, dataclasses.replace(CPU_PROFILE, device=A100), 2**30, None)
    assert memory.num_ranks == 16 and len(memory.levels) == 2
    assert len(this_machine(64, CPU).levels) == 1


def test_a_named_device_is_scaled_by_datasheets_and_marked_as_an_estimate():
    cluster = cluster_of_figures(8, dataclasses.replace(chain(4), device=A100), None, 5e10, "H100-SXM")
    device = cluster.device(7)
    assert (device.name, device.memory_bytes) == ("H100-80GB", 80 * 10**9)
    # float32: 67 against 19.5 TFLOP/s, 3350 against 2039 GB/s
    assert device.speed == pytest.approx((67 / 19.5 * 3350 / 2039) ** 0.5)
    assert cluster.source.startswith("estimate from datasheets: 2.38 times the speed of A100-80GB")
    assert cluster.levels[0].bandwidth == 5e10


def test_given_memory_takes_precedence_over_the_datasheet():
    cluster = cluster_of_figures(2, dataclasses.replace(chain(4), device=A100), 2**30, None, "h200")
    assert (cluster.device(0).name, cluster.device(0).memory_bytes) == ("H200-141GB", 2**30)


def test_an_unknown_device_is_refused_before_the_profiled_device():
    with pytest.raises(PlanError, match=r"unknown device 'H100-80G'; known: A100-40GB, .*Did you mean 'H100-80GB'"):
        cluster_of_figures(2, CPU_PROFILE, None, None, "H100-80G")


def test_the_precision_is_that_of_most_parameters():
    profile = chain(4)
    names = list(profile.graph.parameters)
    half = {
        name: dataclasses.replace(spec, dtype="bfloat16" if name != names[0] else spec.dtype)
        for name, spec in profile.graph.parameters.items()
    }
    assert precision_of(profile) == "fp32"
    autocast = dataclasses.replace(profile.workload, precision="fp16")
    assert precision_of(dataclasses.replace(profile, workload=autocast)) == "fp16"
    graph = dataclasses.replace(profile.graph, parameters=half)
    assert precision_of(dataclasses.replace(profile, graph=graph)) == "bf16"


def plan_request(**given):
    cluster = ClusterSettings(gpu_memory_bytes=given.pop("gpu_memory_bytes", None), link=given.pop("link", None))
    return request_of(PlanSettings(ProfileSettings(ModelSettings()), cluster=cluster, **given))


def test_omitted_values_keep_the_stored_ones():
    stored = plan_request(gpus=2, schedule="1f1b")
    assert stored.overlaid(plan_request()) == stored
    assert stored.changes_to(stored.overlaid(plan_request(schedule="1f1b"))) == ()


def test_changed_values_are_listed_with_both_values():
    stored = plan_request(gpus=2, batch_size=32)
    changed = stored.overlaid(plan_request(gpus=4, batch_size=64, link=1e9))
    assert stored.changes_to(changed) == (
        "--gpus 2 -> 4",
        "--batch-size 32 -> 64",
        "--link unset -> 1000000000.0",
    )


def test_microbatch_size_and_num_microbatches_replace_each_other():
    changed = plan_request(num_microbatches=4).overlaid(plan_request(microbatch_size=2))
    assert (changed.num_microbatches, changed.microbatch_size) == (None, 2)


def test_each_figure_may_be_given_alone():
    here = this_machine(2, CPU)
    memory, link = cluster_of_figures(2, CPU_PROFILE, 2**30, None), cluster_of_figures(2, CPU_PROFILE, None, 1e9)
    assert (memory.device(0).memory_bytes, memory.levels) == (2**30, here.levels)
    assert (link.device(0).name, link.levels[0].bandwidth) == (here.device(0).name, 1e9)
    assert link.device(0).memory_bytes > 0
    device = cluster_of_figures(2, CPU_PROFILE, None, None, "H100-80GB")
    assert device.levels[0].name == "assumed"


def test_measured_links_of_this_kind_of_device_are_used():
    links = Links("cpu", 1e-4, 4e9, 2e9)
    assert this_machine(2, CPU, links).source == "measured"
    assert this_machine(2, CPU, links).levels == (links.level(2),)
    assert this_machine(2, A100, links).source == "assumed"


def test_a_cluster_without_datasheets_stays_as_it_is():
    here = this_machine(2, CPU)
    assert by_datasheet(here, CPU_PROFILE) is here
