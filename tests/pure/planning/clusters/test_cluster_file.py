"""cluster.toml and its quantities: parsed or refused."""

import re
from pathlib import Path

import pytest
from support.planning_cases import CLUSTER_FILE

from autopipe.errors import PlanError
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.planning.clusters import read_cluster, uniform_cluster
from autopipe.planning.cost.datasheets import datasheet

SPEED = "speed = 1.0"


def cluster_from(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return read_cluster(path)


def test_a_file_is_read(tmp_path):
    assert cluster_from(tmp_path, CLUSTER_FILE) == Cluster(
        (Level("node", 4, 1e10, 5e-6), Level("cluster", 4, 1.25e9, 2e-5)),
        (ClusterDevice("V100-16GB", 16 * 2**30, 1.0),),
        "datasheet",
    )


def test_the_documented_files_are_read(tmp_path):
    page = Path(__file__).resolve().parents[4] / "docs" / "cli.md"
    first, second = re.findall(r"^```toml$(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    more = f'{SPEED}\nmemory_speed = 1.0\nhost_bandwidth = "25GB/s"'  # the page has two more keys
    assert cluster_from(tmp_path, first) == cluster_from(tmp_path, CLUSTER_FILE.replace(SPEED, more))
    assert cluster_from(tmp_path, first).device(0).host_bandwidth == 25e9
    cluster = cluster_from(tmp_path, second)
    assert cluster.num_ranks == 16
    assert {cluster.device(rank).name for rank in range(16)} == {datasheet("H100-SXM").name}
    assert [cluster.link(0, rank).bandwidth for rank in (7, 8)] == [450e9, 50e9]


def test_devices_may_differ_by_rank(tmp_path):
    head, _, levels = CLUSTER_FILE.partition("[[level]]")
    mixed = '[[device]]\nname = "fast"\ncount = 12\nspeed = 2\n[[device]]\nname = "slow"\ncount = 4\n[[level]]'
    cluster = cluster_from(tmp_path, mixed + levels)
    assert [cluster.device(rank).name for rank in (0, 11, 12, 15)] == ["fast", "fast", "slow", "slow"]
    assert cluster.device(0).speed == 2.0
    with pytest.raises(PlanError, match=r"describes 5 ranks, but the levels have 4 x 4 = 16"):
        cluster_from(tmp_path, mixed.replace("12", "1") + levels)
    assert head


@pytest.mark.parametrize(
    ("change", "message", "where"),
    [
        (("source =", "sorce ="), "unknown key 'sorce'; known: device, level, source. Did you mean 'source'", ""),
        (("speed = 1.0", "speed = 0"), "speed is 0; it must be a number larger than 0", ": device"),
        (("count = 4", "count = 0"), "count is 0; it must be a whole number of at least 1", ": level 0"),
        (('bandwidth = "10GB/s"\n', ""), "bandwidth is missing", ": level 0"),
        (('"10GB/s"', '"0GB/s"'), "a bandwidth must be larger than 0", ": level 0.bandwidth"),
        (('"16GiB"', "16"), "16 is not a size in bytes", ": device.memory"),
        (('"node"', "3"), "name is 3; it must be a string in quotes", ": level 0"),
        (("[device]", "[device"), "cluster.toml is not TOML", ""),
        (('"datasheet"', '"guess"'), "unknown source 'guess'; known: datasheet, measured.", ""),
        (('"datasheet"', "3"), "unknown source '3'; known: datasheet, measured.", ""),
    ],
)
def test_a_wrong_file_is_refused_with_its_key(tmp_path, change, message, where):
    with pytest.raises(PlanError) as caught:
        cluster_from(tmp_path, CLUSTER_FILE.replace(*change))
    assert message in caught.value.what
    assert caught.value.where == f"{tmp_path / 'cluster.toml'}{where}"


def test_a_missing_file_and_a_file_without_levels_are_refused(tmp_path):
    with pytest.raises(PlanError, match=r"no\.toml cannot be read"):
        read_cluster(tmp_path / "no.toml")
    with pytest.raises(PlanError, match=r"there is no \[\[level\]\]"):
        cluster_from(tmp_path, 'source = "x"\n')


def test_options_make_a_uniform_cluster():
    cluster = uniform_cluster(512, memory="80GiB", link="400Gbit/s")
    assert cluster.num_ranks == 512
    assert cluster.device(511).memory_bytes == 80 * 2**30
    assert cluster.link(0, 511).bandwidth == 5e10
    with pytest.raises(PlanError, match="larger than 0"):
        uniform_cluster(2, link="0GB/s")


def test_a_device_that_is_not_a_table_is_refused(tmp_path):
    text = (
        CLUSTER_FILE.replace("[device]", "device = 3\n[other]")
        .replace("[other]\n", "")
        .replace('name = "V100-16GB"\nmemory = "16GiB"\nspeed = 1.0\n', "")
    )
    with pytest.raises(PlanError, match="device is 3; it must be a table"):
        cluster_from(tmp_path, text)


def test_an_entry_of_a_list_that_is_not_a_table_is_refused(tmp_path):
    _, _, levels = CLUSTER_FILE.partition("[[level]]")
    with pytest.raises(PlanError, match="expected a table, got 'V100'"):
        cluster_from(tmp_path, f'device = ["V100"]\n[[level]]{levels}')
