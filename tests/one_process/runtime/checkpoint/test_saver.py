"""Checkpoints are written during training: copies are written one at a time, and failures are raised."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from autopipe.errors import ArtifactError, AutopipeError
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.checkpoint import saver as saver_module
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.checksums import bits
from autopipe.runtime.checkpoint.directory import unfinished
from autopipe.runtime.checkpoint.manifest import Manifest, StageState
from autopipe.runtime.checkpoint.parts import Part, finish, write_part
from autopipe.runtime.checkpoint.saver import Saver
from autopipe.runtime.checkpoint.snapshot import Snapshot

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def manifest(step: int) -> Manifest:
    return Manifest(step, 0, step, 0, "g", "p", ())


def part(stage: int, **tensors: torch.Tensor) -> Part:
    return Part(stage, Snapshot.of(tensors))


def tensors() -> dict[str, torch.Tensor]:
    tensors_by_name = {f"t{i}": torch.arange(5 + i).to(dtype) for i, dtype in enumerate(DTYPES)}
    tensors_by_name["scalar"] = torch.tensor(3.5)
    tensors_by_name["empty"] = torch.zeros(0, 4)
    tensors_by_name["transposed"] = torch.arange(12.0).view(3, 4).t()
    tensors_by_name["channels"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors_by_name["parameter"] = torch.nn.Parameter(torch.randn(3))
    return tensors_by_name


def assert_holds(path: Path, expected: dict[str, torch.Tensor]) -> None:
    weights = load_file(path)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype and torch.equal(weights[name], tensor), name


def test_a_snapshot_is_a_safetensors_file_of_every_dtype_and_layout(tmp_path: Path) -> None:
    expected = tensors()
    Snapshot.of(expected).write(tmp_path / "file")
    assert_holds(tmp_path / "file", expected)


def test_a_file_is_described_by_its_sha256_and_size_and_has_the_mode_of_a_new_file(tmp_path: Path) -> None:
    temporary = unfinished(tmp_path, 1, "p")
    write_part(temporary, part(0, **tensors()), (1,))
    folder = finish(tmp_path, temporary, (1,), manifest(1), 0)
    (file,) = Checkpoint(folder).manifest.files
    data = (folder / file.file).read_bytes()
    assert (file.sha256, file.bytes) == (hashlib.sha256(data).hexdigest(), len(data))
    (tmp_path / "new").touch(0o644)
    assert (folder / file.file).stat().st_mode == (tmp_path / "new").stat().st_mode


def test_a_snapshot_reuses_its_buffer_and_holds_the_last_copy(tmp_path: Path) -> None:
    snapshot = Snapshot()
    large = {"a": torch.randn(1000), "b": torch.randn(10)}
    snapshot.take(large)
    before = snapshot._buffer.bytes.data_ptr()
    small = {"c": torch.randn(7, 3)}
    snapshot.take(small)
    assert snapshot._buffer.bytes.data_ptr() == before
    snapshot.write(tmp_path / "file")
    assert_holds(tmp_path / "file", small)


def test_changes_after_the_copy_do_not_change_the_file(tmp_path: Path) -> None:
    weight = torch.ones(4)
    snapshot = Snapshot.of({"w": weight})
    weight.zero_()
    snapshot.write(tmp_path / "file")
    assert_holds(tmp_path / "file", {"w": torch.ones(4)})


def test_a_dtype_that_the_format_lacks_is_named() -> None:
    with pytest.raises(ArtifactError, match=r"w is torch\.complex128, which a checkpoint cannot hold"):
        Snapshot.of({"w": torch.zeros(1, dtype=torch.complex128)})


def test_rank_0_finishes_a_checkpoint_once_the_others_have_written(tmp_path: Path) -> None:
    first, second = Saver(tmp_path, (1, 1), keep=0, leads=True), Saver(tmp_path, (1, 1), keep=0, leads=False)
    first.write(manifest(3), [part(0, a=torch.ones(2))])
    assert first.finished() == []
    assert checkpoints.steps(tmp_path) == []
    second.write(manifest(3), [part(1, b=torch.zeros(2))])
    second.wait()
    first.wait()
    assert second.finished() == []
    assert first.finished() == [(3, tmp_path / "step-00000003")]
    assert first.finished() == []
    assert Checkpoint(tmp_path / "step-00000003").names == ("a", "b")


def test_at_most_one_checkpoint_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, most, go_on = [0], [0], threading.Event()

    def slow(*args: Any) -> None:
        writing[0] += 1
        most[0] = max(most)
        most.append(writing[0])
        go_on.wait(10)
        write_part(*args)
        writing[0] -= 1

    monkeypatch.setattr(saver_module, "write_part", slow)
    saver = Saver(tmp_path, (1,), keep=0, leads=True)
    saver.write(manifest(1), [part(0, a=torch.ones(2))])
    assert saver.finished() == []  # training continues while it is written
    go_on.set()
    saver.write(manifest(2), [part(0, a=torch.ones(2))])
    saver.wait()
    assert max(most) == 1
    assert [step for step, _ in saver.finished()] == [1, 2]


def test_a_failure_while_writing_is_raised_in_training(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    saver = Saver(blocked, (1,), keep=0, leads=True)
    saver.write(manifest(1), [part(0, a=torch.ones(2))])
    with pytest.raises(ArtifactError, match="the checkpoint of stage 0 cannot be written"):
        saver.wait()
    with pytest.raises(ArtifactError):
        saver.raise_if_failed()


def test_a_missing_stage_is_named(tmp_path: Path) -> None:
    saver = Saver(tmp_path, (1, 1), keep=0, leads=True, timeout_seconds=0.05)
    saver.write(manifest(1), [part(0, a=torch.ones(2))])
    with pytest.raises(ArtifactError, match="stage 1 has not written its part") as caught:
        saver.wait()
    assert "same run directory" in caught.value.remedy


def test_files_of_an_attempt_with_another_plan_are_not_used(tmp_path: Path) -> None:
    cut_off = Saver(tmp_path, (1, 1, 1, 1), keep=0, leads=False)
    cut_off.write(replace(manifest(3), plan_digest="q"), [part(1, b=torch.ones(2))])
    cut_off.wait()
    first, second = Saver(tmp_path, (1, 1), keep=0, leads=True), Saver(tmp_path, (1, 1), keep=0, leads=False)
    first.write(manifest(3), [part(0, a=torch.ones(2))])
    second.write(manifest(3), [part(1, b=torch.zeros(2))])
    first.wait()
    checkpoint = Checkpoint(tmp_path / "step-00000003")
    assert [stage.file for stage in checkpoint.manifest.files] == [f"stage-{i}-of-2.safetensors" for i in range(2)]
    assert checkpoint.read(["b"])["b"].tolist() == [0.0, 0.0]


def test_a_failed_session_does_not_wait_for_others(tmp_path: Path) -> None:
    saver = Saver(tmp_path, (1, 1), keep=0, leads=True)
    saver.write(manifest(1), [part(0, a=torch.ones(2))])
    saver.cancel()
    saver.wait()
    assert saver.finished() == []
    assert unfinished(tmp_path, 1, manifest(1).plan_digest).is_dir()


def test_copies_of_a_tied_parameter_are_compared_at_every_checkpoint(tmp_path: Path) -> None:
    weight = torch.randn(5, 3)
    other = weight.clone()
    other[4, 2] = torch.nextafter(other[4, 2], torch.tensor(9.0))
    assert bits(weight) == bits(weight.t().contiguous().t()) != bits(other)

    def save(step: int, copy: torch.Tensor) -> Saver:
        saver = Saver(tmp_path, (1, 1), keep=0, leads=True)
        parts = [Part(0, Snapshot.of({"w": weight}), StageState(), {"w": bits(weight)})]
        parts.append(Part(1, Snapshot.of({"b": weight}), StageState(), {"w": bits(copy)}))
        saver.write(manifest(step), parts)
        return saver

    save(1, weight.clone()).wait()
    with pytest.raises(AutopipeError, match="w is tied, and its copies are no longer equal"):
        save(2, other).wait()
    assert checkpoints.steps(tmp_path) == [1]


def test_a_failed_rank_first_finishes_the_checkpoint_in_flight(tmp_path: Path) -> None:
    first, second = Saver(tmp_path, (1, 1), keep=0, leads=True), Saver(tmp_path, (1, 1), keep=0, leads=False)
    second.wait_up_to()  # no checkpoint is in flight
    second.write(manifest(3), [part(1, b=torch.zeros(2))])
    first.write(manifest(3), [part(0, a=torch.ones(2))])
    second.wait_up_to(30)
    assert checkpoints.steps(tmp_path) == [3]
    second.write(manifest(4), [part(1, b=torch.zeros(2))])
    second.wait_up_to(0.05)  # rank 0 has ended: the wait is short
    assert checkpoints.steps(tmp_path) == [3]
