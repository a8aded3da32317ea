"""Artifacts are read back as written; anything else is one clear error."""

from __future__ import annotations

import dataclasses
import enum
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.errors import ArtifactError
from autopipe.ir import artifact, decoding
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.runtime.job import Job


@pytest.fixture
def cluster() -> Cluster:
    return Cluster((Level("node", 2, 1e9, 5e-6),), (ClusterDevice("cpu", 1 << 30),), "flags")


def test_a_saved_value_is_loaded(tmp_path: Path, cluster: Cluster) -> None:
    artifact.save(cluster, tmp_path / "cluster.json")
    assert artifact.load(Cluster, tmp_path / "cluster.json", renew="x") == cluster


def test_a_job_of_an_earlier_version_is_loaded_without_what_was_removed(tmp_path: Path) -> None:
    job = Job(steps=3, epochs=0, batch_size=8, data_reader="each")
    body = {**artifact.encode(job), "data_repeats": True}
    del body["first_minibatch"]
    head = {"kind": "Job", "schema_version": Job.FORMAT, "digest": artifact.digest(body)}
    (tmp_path / "job.json").write_text(json.dumps({**head, **body}))
    assert artifact.load(Job, tmp_path / "job.json", renew="x") == job


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


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True)
class Box:
    """A field of every kind that an artifact may have."""

    pair: tuple[int, str] = (1, "a")
    color: Color = Color.RED
    size: float = 1.0
    limit: int | None = None
    names: dict[str, int] = dataclasses.field(default_factory=dict)
    anything: Any = None

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must be at least 0, and is {self.size}")
        if self.color == Color.BLUE and not self.names:
            raise ArtifactError("a blue box needs names", remedy="name something")


@pytest.mark.parametrize(
    ("document", "value"),
    [
        ({}, Box()),
        ({"pair": [2, "b"], "size": 3, "limit": 4}, Box((2, "b"), size=3.0, limit=4)),
        ({"color": "blue", "names": {"x": 1}, "anything": [1, {"y": None}]},
         Box(color=Color.BLUE, names={"x": 1}, anything=[1, {"y": None}])),
        ({"pair": [1, "\udc80"]}, Box((1, "\udc80"))),
    ],
)  # fmt: skip
def test_every_kind_of_field_is_decoded(document: dict[str, Any], value: Box) -> None:
    assert decoding.decode(Box, document, "") == value
    assert decoding.decode(Box, json.loads(artifact.canonical(value)), "") == value


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "expected an object"),
        ({"pair": [1]}, "pair: expected a list of 2"),
        ({"pair": 1}, "pair: expected a list"),
        ({"pair": [1, "a\0"]}, r"pair\[1\]: expected text"),
        ({"pair": [1, "\ud800"]}, r"pair\[1\]: expected text"),
        ({"pair": [2**63, "a"]}, r"pair\[0\]: expected a number below 2\*\*63"),
        ({"color": "green"}, "color: expected one of red, blue"),
        ({"size": float("inf")}, "size: expected a finite number"),
        ({"size": 2**64}, "size: expected a float"),
        ({"size": -1.0}, "size must be at least 0, and is -1.0"),
        ({"limit": "x"}, "limit: expected an int"),
        ({"names": [1]}, "names: expected an object"),
        ({"names": {"x": 1.5}}, r"names\.x: expected an int"),
        ({"names": {"\ud800": 1}}, "expected text"),
        ({"color": "blue"}, "a blue box needs names"),
        ({"nothing": 1}, "unknown key 'nothing'"),
    ],
)
def test_a_wrong_value_is_refused_with_its_field(document: Any, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        decoding.decode(Box, document, "")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff{}", "it is not valid UTF-8"),
        (b"{", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[]", "it does not contain an object"),
        (b'{"kind": "Cluster", "kind": "Cluster"}', 'key "kind" appears twice'),
        (b'{"source": NaN}', "NaN is not allowed as a number"),
        (b'{"kind": 3}', "it is a 3 of format null; expected a Cluster of format"),
    ],
)
def test_a_file_without_a_document_is_damaged(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_bytes(data)
    with pytest.raises(ArtifactError) as caught:
        artifact.load(Cluster, path, renew="autopipe plan")
    assert caught.value.what.startswith("cluster.json is damaged: ") and message in caught.value.what


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=f"{tmp_path.name} cannot be read: Is a directory"):
        artifact.load(Cluster, tmp_path, renew="autopipe plan")
