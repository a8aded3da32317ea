"""Checkpoints: complete or absent, verified when read, and never executable."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import save

from autopipe.errors import ArtifactError
from autopipe.runtime.checkpoint.checkpoint import Checkpoint, intact
from autopipe.runtime.checkpoint.directory import clear_unfinished, directory_of, set_aside, steps, unfinished
from autopipe.runtime.checkpoint.parts import Part, write_part
from autopipe.runtime.checkpoint.snapshot import Snapshot


def edit_manifest(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Write the manifest as an attacker would, with a matching digest."""
    document = json.loads((folder / "manifest.json").read_text())
    document.pop("digest", None)
    change(document["files"])
    (folder / "manifest.json").write_text(json.dumps(document))


def test_tensors_saved_by_two_stages_are_read_by_name(tmp_path: Path) -> None:
    save(tmp_path, 4)
    checkpoint = Checkpoint.latest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.manifest.step == 4
    assert checkpoint.read(["model.w1"])["model.w1"].tolist() == [5.0] * 3
    assert [stage.owned for stage in checkpoint.stages] == [("w0",), ("w1",)]
    assert (tmp_path / "latest").read_text() == "step-00000004\n"


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [3, 4]


def test_a_checkpoint_is_replaced_before_the_old_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash while files are removed leaves the new checkpoint."""
    save(tmp_path, 1)
    before: list[list[int]] = []
    remove = shutil.rmtree

    def observed(path: Path, ignore_errors: bool = False) -> None:
        before.append(steps(tmp_path))
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", observed)
    save(tmp_path, 1)
    assert before and all(present == [1] for present in before)


def test_an_unfinished_checkpoint_is_ignored(tmp_path: Path) -> None:
    save(tmp_path, 1)
    write_part(unfinished(tmp_path, 2, "p"), Part(0, Snapshot.of({"model.w0": torch.zeros(1)})), (1, 1))
    assert steps(tmp_path) == [1]
    save(tmp_path, 2)
    assert steps(tmp_path) == [1, 2]


def test_an_unknown_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"does not hold 'model.w9' \(1 missing\)"):
        Checkpoint(save(tmp_path, 1)).read(["model.w9"])


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda b: b + b"x"])
def test_a_truncated_or_flipped_file_is_refused(tmp_path: Path, damage) -> None:
    folder = save(tmp_path, 1)
    file = folder / "stage-0-of-2.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ArtifactError, match="is not what was written: its SHA-256 differs"):
        Checkpoint(folder).read(["model.w0"])
    with pytest.raises(ArtifactError, match="is not what was written: its SHA-256 differs"):
        Checkpoint(folder).verify()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "stage-1-of-2.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"stage-1-of-2\.safetensors is missing"):
        Checkpoint(folder).read(["model.w1"])


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "stage-0-of-2.safetensors/../x", "stage-0-of-2.pt"]
)
def test_a_manifest_cannot_refer_to_other_folders(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1)
    edit_manifest(folder, lambda files: files[0].update(file=name))
    with pytest.raises(ArtifactError, match="is not the name of a stage's file"):
        Checkpoint(folder)


def test_a_failure_to_write_is_reported(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ArtifactError, match="the checkpoint of stage 0 cannot be written"):
        write_part(blocked / "step", Part(0, Snapshot.of({"model.w": torch.zeros(1)})), (1,))


def test_the_steps_of_intact_checkpoints_are_listed(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (directory_of(tmp_path, 4) / "manifest.json").unlink()
    (directory_of(tmp_path, 2) / "stage-1-of-2.safetensors").write_bytes(b"")
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert intact(tmp_path) == [1, 3]


def test_a_manifest_that_names_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    edit_manifest(folder, lambda files: files[1]["tensors"].append("model.w7"))
    with pytest.raises(ArtifactError, match=r"stage-1-of-2\.safetensors lacks tensor 'model\.w7'"):
        Checkpoint(folder).verify()


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path(self.path),)


def test_a_pickle_in_a_stage_file_is_refused_and_does_not_run(tmp_path: Path) -> None:
    import hashlib

    folder, trace = save(tmp_path, 1), tmp_path / "it-ran"
    file = folder / "stage-0-of-2.safetensors"
    torch.save({"model.w0": Bomb(str(trace))}, file)
    digest, size = hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_size
    edit_manifest(folder, lambda files: files[0].update(sha256=digest, bytes=size))
    with pytest.raises(ArtifactError, match="is damaged"):
        Checkpoint(folder).verify()
    with pytest.raises(ArtifactError, match="is damaged"):
        Checkpoint(folder).read(["model.w0"])
    assert not trace.exists()


def test_resuming_from_an_earlier_step_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-00000004.tmp").mkdir()
    (tmp_path / "step-00000001.old").mkdir()
    assert set_aside(tmp_path, 1) == [2, 3]
    left = ["latest", "step-00000001", "step-00000002.abandoned", "step-00000003.abandoned"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert steps(tmp_path) == [1]


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    unfinished(tmp_path, 2, "p").mkdir()
    (tmp_path / ".latest.123.tmp").write_text("step-0")
    clear_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    clear_unfinished(tmp_path / "not there")


def test_a_crash_between_two_renames_keeps_the_checkpoint_that_was_to_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    before = Checkpoint(tmp_path / "step-00000001").manifest
    rename = Path.rename

    def crash(path: Path, target: Path) -> Path:
        if path.name.endswith(".tmp") and path.is_dir():
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    monkeypatch.undo()
    assert steps(tmp_path) == []
    clear_unfinished(tmp_path)
    assert steps(tmp_path) == [1]
    assert Checkpoint(tmp_path / "step-00000001").manifest == before
    Checkpoint(tmp_path / "step-00000001").verify()
