"""Artifacts are read back as written; anything else is one clear error."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.errors import ArtifactError
from autopipe.ir import artifact
from autopipe.ir.cluster import Cluster, ClusterDevice, Level


@pytest.fixture
def cluster() -> Cluster:
    return Cluster((Level("node", 2, 1e9, 5e-6),), (ClusterDevice("cpu", 1 << 30),), "flags")


def test_a_saved_value_is_loaded(tmp_path: Path, cluster: Cluster) -> None:
    artifact.save(cluster, tmp_path / "cluster.json")
    assert artifact.load(Cluster, tmp_path / "cluster.json", renew="x") == cluster


def test_a_missing_file_is_refused_with_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"there is no plan\.json") as caught:
        artifact.load(Cluster, tmp_path / "plan.json", renew="autopipe plan")
    assert caught.value.remedy == "autopipe plan"
    assert caught.value.where.endswith("plan.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["levels"][0].update(count="two"), r"levels\[0\].count: expected an int, found \"two\""),
        (lambda d: d["levels"][0].update(count=0), r"levels\[0\]: level 'node': count must be from 1"),
        (lambda d: d["levels"][0].pop("name"), r"levels\[0\]: key 'name' is missing"),
        (lambda d: d.update(extra=1), "unknown key 'extra'"),
        (lambda d: d.update(schema_version=99), "of format 99"),
        (lambda d: d.update(kind="Plan"), "is a Plan of format 1; expected a Cluster"),
        (lambda d: d["levels"][0].update(bandwidth=None), "expected a float, found null"),
        (lambda d: d.update(devices={}), "expected a list"),
        (lambda d: d["devices"][0].update(memory_bytes=True), "expected an int, found true"),
    ],
)
def test_a_changed_file_is_refused_with_the_name_of_the_field(tmp_path, cluster, change, message) -> None:
    path = tmp_path / "cluster.json"
    artifact.save(cluster, path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match=message):
        artifact.load(Cluster, path, renew="autopipe plan")


@given(position=st.integers(0, 400), byte=st.binary(min_size=1, max_size=3))
def test_damage_to_a_file_never_causes_a_traceback(tmp_path_factory, position: int, byte: bytes) -> None:
    path = tmp_path_factory.mktemp("damage") / "cluster.json"
    good = Cluster((Level("node", 2, 1e9, 5e-6),), (ClusterDevice("cpu", 1 << 30),), "flags")
    artifact.save(good, path)
    data = path.read_bytes()
    path.write_bytes(data[:position] + byte + data[position + 1 :])
    try:
        artifact.load(Cluster, path, renew="autopipe plan")
    except ArtifactError as error:
        assert error.remedy.startswith("autopipe plan")


def test_equal_values_have_one_text_whatever_the_order_of_keys() -> None:
    @dataclasses.dataclass(frozen=True)
    class Box:
        items: dict[str, int]

    assert artifact.canonical(Box({"a": 1, "b": 2})) == artifact.canonical(Box({"b": 2, "a": 1}))


def test_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an artifact cannot contain"):
        artifact.encode({"x": float("nan")})


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, cluster: Cluster, monkeypatch) -> None:
    path = tmp_path / "cluster.json"
    artifact.save(cluster, path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ArtifactError, match=r"the disk of .*cluster\.json is full"):
        artifact.save(dataclasses.replace(cluster, source="other"), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["cluster.json"]
