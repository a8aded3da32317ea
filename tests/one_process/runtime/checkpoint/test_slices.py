"""A tensor of a checkpoint may lie in several files: it is read as a whole, and never in part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autopipe.errors import ArtifactError
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.directory import unfinished
from autopipe.runtime.checkpoint.manifest import Manifest, TensorSlice
from autopipe.runtime.checkpoint.parts import Part, finish, write_part
from autopipe.runtime.checkpoint.snapshot import Snapshot
from autopipe.runtime.checkpoint.weight_files import open_weights

FUSED = torch.arange(3 * 8 * 5.0).view(24, 5)  # 3 blocks of 8 rows
TABLE = torch.arange(6.0 * 7).view(6, 7)
WHOLE = torch.arange(4, dtype=torch.int64)
NAME = "stage-0-of-1.part-{}-of-2.safetensors"


def save(folder: Path) -> Path:
    """Write a checkpoint whose two writers have a part of each of two tensors."""
    temporary = unfinished(folder, 1, "p")
    for index in range(2):
        tensors = {
            "model.fused": FUSED.view(3, 2, 4, 5)[:, index].reshape(12, 5),
            "model.table": TABLE[:, :3] if index == 0 else TABLE[:, 3:],
        }
        slices = {"model.fused": TensorSlice(0, index, 2, blocks=3), "model.table": TensorSlice(1, index, 2)}
        if index == 1:
            tensors["model.whole"] = WHOLE
        write_part(temporary, Part(0, Snapshot.of(tensors), slices=slices, place=index, writers=2), (2,))
    return finish(folder, temporary, (2,), Manifest(1, 0, 1, 0, "g", "p", ()), 0)


def test_a_tensor_in_several_files_is_read_as_a_whole(tmp_path: Path) -> None:
    folder = save(tmp_path)
    checkpoint = Checkpoint(folder)
    checkpoint.verify()
    assert checkpoint.shapes() == {"model.fused": (24, 5), "model.table": (6, 7), "model.whole": (4,)}
    read = checkpoint.read(["model.table", "model.whole", "model.fused"])
    assert list(read) == ["model.table", "model.whole", "model.fused"]
    for name, expected in (("fused", FUSED), ("table", TABLE), ("whole", WHOLE)):
        tensor = read[f"model.{name}"]
        assert torch.equal(tensor, expected) and tensor.dtype == expected.dtype and tensor.is_contiguous(), name
    weights = open_weights(folder)
    assert weights.shapes["table"] == (6, 7) and torch.equal(weights.read(["table"])["table"], TABLE)


def test_only_the_files_of_the_wanted_tensors_are_read(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / NAME.format(0)).unlink()
    assert torch.equal(Checkpoint(folder).read(["model.whole"])["model.whole"], WHOLE)
    with pytest.raises(ArtifactError, match=r"part-0-of-2\.safetensors is missing from the checkpoint"):
        Checkpoint(folder).read(["model.table"])


def lose(files: list[dict[str, Any]]) -> None:
    files[0]["tensors"].remove("model.table")


def repeat(files: list[dict[str, Any]]) -> None:
    files[0]["slices"]["model.table"]["index"] = 1


def count_more(files: list[dict[str, Any]]) -> None:
    for file in files:
        file["slices"]["model.table"]["count"] = 10**15


def cut_differently(files: list[dict[str, Any]]) -> None:
    files[0]["slices"]["model.table"]["dim"] = 0


def list_as_whole(files: list[dict[str, Any]]) -> None:
    del files[0]["slices"]["model.table"]


def list_as_whole_last(files: list[dict[str, Any]]) -> None:
    del files[1]["slices"]["model.table"]


@pytest.mark.parametrize("change", [lose, repeat, count_more, cut_differently, list_as_whole, list_as_whole_last])
def test_a_manifest_without_every_slice_is_refused(change: Callable[[Any], None], tmp_path: Path) -> None:
    folder = save(tmp_path)
    edit(folder, change)
    with pytest.raises(ArtifactError, match=r"does not list every slice of 'model\.table' once"):
        Checkpoint(folder)


def other_dimension(files: list[dict[str, Any]]) -> None:
    for file in files:
        file["slices"]["model.table"]["dim"] = 0


def no_dimension(files: list[dict[str, Any]]) -> None:
    for file in files:
        file["slices"]["model.table"]["dim"] = 7


def odd_blocks(files: list[dict[str, Any]]) -> None:
    for file in files:
        file["slices"]["model.table"]["blocks"] = 5


@pytest.mark.parametrize("change", [other_dimension, no_dimension, odd_blocks])
def test_slices_that_do_not_fit_together_are_refused(change: Callable[[Any], None], tmp_path: Path) -> None:
    folder = save(tmp_path)
    edit(folder, change)
    with pytest.raises(ArtifactError, match=r"the slices of 'model\.table' do not fit together"):
        Checkpoint(folder).read(["model.table"])
    with pytest.raises(ArtifactError, match=r"the slices of 'model\.table' do not fit together"):
        Checkpoint(folder).shapes()


def test_a_slice_outside_its_count_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    edit(folder, lambda files: files[0]["slices"]["model.table"].update(index=2))
    with pytest.raises(ArtifactError, match="an index below its count"):
        Checkpoint(folder)


def test_a_manifest_from_before_slices_is_read(tmp_path: Path) -> None:
    temporary = unfinished(tmp_path, 1, "p")
    write_part(temporary, Part(0, Snapshot.of({"model.whole": WHOLE})), (1,))
    folder = finish(tmp_path, temporary, (1,), Manifest(1, 0, 1, 0, "g", "p", ()), 0)
    edit(folder, lambda files: files[0].pop("slices"))
    assert [path.name for path in folder.glob("*.safetensors")] == ["stage-0-of-1.safetensors"]
    assert torch.equal(Checkpoint(folder).read(["model.whole"])["model.whole"], WHOLE)


def edit(folder: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    document = json.loads((folder / "manifest.json").read_text())
    document.pop("digest")
    change(document["files"])
    (folder / "manifest.json").write_text(json.dumps(document))
