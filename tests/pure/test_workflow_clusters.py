"""Cluster files, and what a request says against what a stored one said."""

import pytest

from autopipe.errors import PlanError
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.profile import Device
from autopipe.workflow.clusters import cluster_of_figures, read_cluster, this_machine
from autopipe.workflow.requests import PlanRequest
from autopipe.workflow.settings import ClusterSettings, ModelSettings, PlanSettings, ProfileSettings

FILE = """
source = "datasheet"
[device]
name = "V100-16GB"
memory = "16GiB"
speed = 1.0
[[level]]
name = "node"
count = 4
bandwidth = "10GB/s"
latency = "5us"
[[level]]
name = "cluster"
count = 2
bandwidth = "1.25GB/s"
latency = "20us"
"""
CPU = Device("cpu", "some cpu", 8 * 2**30)


def write(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def test_the_file_of_the_documentation_is_a_cluster(tmp_path):
    assert read_cluster(write(tmp_path, FILE)) == Cluster(
        (Level("node", 4, 1e10, 5e-6), Level("cluster", 2, 1.25e9, 2e-5)),
        (ClusterDevice("V100-16GB", 16 * 2**30, 1.0),),
        "datasheet",
    )


def test_devices_may_differ(tmp_path):
    text = '[[device]]\nmemory = "1GiB"\n[[device]]\nmemory = "2GiB"\nspeed = 2\n'
    text += '[[level]]\nname = "a"\ncount = 2\nbandwidth = "1GB/s"\n'
    found = read_cluster(write(tmp_path, text))
    assert [(d.memory_bytes, d.speed) for d in found.devices] == [(2**30, 1.0), (2**31, 2.0)]


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (("bandwidth", "bandwith"), r"unknown key of \[\[level\]\] 'bandwith'.*Did you mean 'bandwidth'"),
        (("count = 4", ""), "key 'count' is missing"),
        (('"10GB/s"', '"fast"'), "'fast' is no rate"),
        (("[[level]]", "[[levels]]"), "unknown key 'levels'.*Did you mean 'level'"),
        (("count = 4", "count = 0"), "count >= 1"),
        (('"16GiB"', "16GiB"), "is no TOML file"),
    ],
)
def test_a_cluster_file_that_is_none_is_refused_by_name(tmp_path, change, shown):
    with pytest.raises(PlanError, match=shown) as caught:
        read_cluster(write(tmp_path, FILE.replace(*change)))
    assert caught.value.where.endswith("cluster.toml")


def test_a_missing_cluster_file_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"there is no cluster file .*none\.toml"):
        read_cluster(tmp_path / "none.toml")


def test_figures_replace_what_this_machine_has():
    found = cluster_of_figures(4, CPU, 2**30, 3.125e9)
    assert found.num_ranks == 4
    assert found.levels[0].bandwidth == 3.125e9
    assert found.device(3).memory_bytes == 2**30
    assert found.source == "command line"


def test_this_machine_shares_its_memory_among_cpu_ranks_and_says_that_it_assumes():
    two, four = this_machine(2, CPU), this_machine(4, CPU)
    assert two.source == "assumed"
    assert 0 < four.device(0).memory_bytes < two.device(0).memory_bytes


def test_a_gpu_has_the_memory_that_was_profiled():
    assert this_machine(2, Device("cuda", "H", 5 * 2**30)).device(1).memory_bytes == 5 * 2**30


def request_of(**given):
    cluster = ClusterSettings(None, given.pop("gpu_memory_bytes", None), given.pop("link", None))
    return PlanRequest.of(PlanSettings(ProfileSettings(ModelSettings()), cluster=cluster, **given))


def test_what_is_not_said_stays():
    stored = request_of(gpus=2, schedule="1f1b")
    assert stored.overlaid(request_of()) == stored
    assert stored.changes_to(stored.overlaid(request_of(schedule="1f1b"))) == ()


def test_what_is_said_is_named_with_both_values():
    stored = request_of(gpus=2, batch_size=32)
    changed = stored.overlaid(request_of(gpus=4, batch_size=64, link=1e9))
    assert stored.changes_to(changed) == (
        "--gpus 2 -> 4",
        "--batch-size 32 -> 64",
        "--link unset -> 1000000000.0",
    )


def test_the_two_ways_to_cut_a_minibatch_replace_each_other():
    changed = request_of(num_microbatches=4).overlaid(request_of(microbatch_size=2))
    assert (changed.num_microbatches, changed.microbatch_size) == (None, 2)
