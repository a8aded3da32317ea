"""Checkpoints: whole or not there, checked when read, and never anything that can run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autopipe.errors import ArtifactError
from autopipe.runtime.checkpoint import Checkpoint, Manifest, directory_of, finish, steps, write_stage


def save(folder: Path, step: int, keep: int = 0) -> Path:
    temporary = directory_of(folder, step).with_suffix(".tmp")
    for stage in range(2):
        tensors = {
            f"model.w{stage}": torch.full((3,), float(step + stage)),
            f"optimizer.w{stage}.step": torch.tensor(step),
        }
        write_stage(temporary, stage, 2, tensors, {f"w{stage}": {"lr": 0.1}}, {"last_epoch": float(step)})
    return finish(folder, temporary, 2, Manifest(step, 0, step, 0, "g", "p", ()), keep)


def test_what_was_saved_by_two_stages_is_read_by_name(tmp_path: Path) -> None:
    save(tmp_path, 4)
    found = Checkpoint.latest(tmp_path)
    assert found is not None
    assert found.manifest.step == 4
    assert found.read(["model.w1"])["model.w1"].tolist() == [5.0] * 3
    assert found.groups == {"w0": {"lr": 0.1}, "w1": {"lr": 0.1}}
    assert (tmp_path / "latest").read_text() == "step-00000004\n"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [3, 4]


def test_a_save_that_was_cut_off_is_not_seen(tmp_path: Path) -> None:
    save(tmp_path, 1)
    write_stage(directory_of(tmp_path, 2).with_suffix(".tmp"), 0, 2, {"model.w0": torch.zeros(1)}, {}, {})
    assert steps(tmp_path) == [1]
    save(tmp_path, 2)
    assert steps(tmp_path) == [1, 2]


def test_a_name_that_is_not_held_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"does not hold 'model.w9' \(1 missing\)"):
        Checkpoint(save(tmp_path, 1)).read(["model.w9"])


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda b: b + b"x"])
def test_a_truncated_or_flipped_file_is_refused(tmp_path: Path, damage) -> None:
    folder = save(tmp_path, 1)
    file = folder / "stage-0-of-2.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ArtifactError, match="is not what was written: its SHA-256 differs"):
        Checkpoint(folder).read(["model.w0"])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "stage-1-of-2.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"stage-1-of-2\.safetensors is missing"):
        Checkpoint(folder).read(["model.w1"])


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "stage-0-of-2.safetensors/../x", "stage-0-of-2.pt"]
)
def test_a_manifest_cannot_point_elsewhere(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][0]["file"] = name
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="is no name for a stage's file"):
        Checkpoint(folder)


def test_a_disk_that_does_not_take_it_is_reported(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ArtifactError, match="the checkpoint of stage 0 cannot be written"):
        write_stage(blocked / "step", 0, 1, {"model.w": torch.zeros(1)}, {}, {})
