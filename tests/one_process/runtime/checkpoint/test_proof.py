"""What a checkpoint holds is compared with the memory of the rank, and what a rank restores with the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.weights import MODEL
from support.pipelines import Captured, Pipeline, build, captured_file, minibatches, plan_for

from autopipe.errors import RunError
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.checksums import checksums
from autopipe.runtime.checkpoint.proof import refuse_other_file
from autopipe.runtime.checkpoint.snapshot import Snapshot

STEPS = 3
KINDS = {
    "a weight": "model.words.weight",
    "a buffer": "running_mean",
    "an integer buffer": "num_batches_tracked",
    "an average": "average.words.weight",
    "an older version": "version.1.words.weight",
    "state of the optimizer": "['exp_avg_sq']",
}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    """A model with tied weights, BatchNorm with its counters, and integer buffers."""
    path = tmp_path_factory.mktemp("net") / "net.py"
    path.write_text(MODEL)
    return captured_file(path, (), 8)


def trained(network: Captured, folder: Path, steps: int, **job: Any) -> Pipeline:
    built = build(network, plan_for(network, 2, "2bw", 3, 8), folder, **{"save": True, "ema": 0.9, **job})
    built.train(minibatches(network.workload, STEPS, 8), steps)
    return built


def changed(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    """Return tensors of which those with ``part`` in their name differ in their last element, by little."""
    others = dict(tensors)
    for name in [name for name in tensors if part in name and tensors[name].numel()]:
        others[name] = tensors[name].clone()
        last = others[name].view(-1)[-1:]
        last.copy_(last + 1 if not last.is_floating_point() else torch.nextafter(last, last + 1))
    return others


@pytest.mark.parametrize("part", KINDS.values(), ids=KINDS)
def test_a_tensor_that_is_saved_wrongly_is_named_and_the_checkpoint_is_not_finished(
    part: str, network: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Snapshot.take
    monkeypatch.setattr(Snapshot, "take", lambda self, tensors, **how: take(self, changed(tensors, part), **how))
    with pytest.raises(RunError, match="is not what was trained") as caught:
        trained(network, tmp_path, 2)
    assert part in caught.value.what and caught.value.where.endswith(".safetensors")
    assert "--resume STEP" in caught.value.remedy
    assert checkpoints.steps(tmp_path / "checkpoints") == []


@pytest.mark.parametrize("part", KINDS.values(), ids=KINDS)
def test_a_tensor_that_is_restored_wrongly_is_named(
    part: str, network: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(network, tmp_path, 2)
    read = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, names: changed(read(self, names), part))
    with pytest.raises(RunError, match="the checkpoint was not restored as it was written") as caught:
        trained(network, tmp_path, STEPS, start_step=2)
    assert part in caught.value.what and "step-00000002" in caught.value.where
    assert "--resume STEP" in caught.value.remedy


@pytest.mark.parametrize("key", ["lr", "betas", "weight_decay", "amsgrad"])
def test_a_value_of_the_optimizer_that_is_restored_wrongly_is_named(
    key: str, network: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autopipe.runtime.checkpoint import state

    trained(network, tmp_path, 2)
    restore = state.restore_training

    def wrong(checkpoint: Any, training: Any, own: Any) -> None:
        restore(checkpoint, training, own)
        before = training.optimizer.param_groups[0][key]
        training.optimizer.param_groups[0][key] = (0.9, 0.98) if key == "betas" else not before

    monkeypatch.setattr(state, "restore_training", wrong)
    with pytest.raises(RunError, match=rf"optimizer\.param_groups\[0\]\['{key}'\]"):
        trained(network, tmp_path, STEPS, start_step=2)


def test_weights_that_are_restored_wrongly_for_an_evaluation_are_named(
    network: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(network, tmp_path, 2)
    items = minibatches(network.workload, STEPS, 8)
    session, *_ = trained(network, tmp_path, STEPS, start_step=2, save=False).train(items, STEPS)
    read = Checkpoint.read
    for averaged in (False, True):
        session.restore_latest(averaged=averaged)
    for averaged, name in ((False, "model.words.weight"), (True, "average.words.weight")):
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoint, "read", lambda self, names, name=name: changed(read(self, names), name))
            with pytest.raises(RunError, match=name):
                session.restore_latest(averaged=averaged)


def test_a_conjugated_and_a_sparse_tensor_are_summed_as_they_are_written(tmp_path: Path) -> None:
    tensors = {"c": torch.tensor([1 + 2j, 3 - 1j]).conj(), "s": torch.eye(3).to_sparse()}
    Snapshot.of(tensors).write(tmp_path / "file")
    refuse_other_file(tmp_path / "file", checksums(tensors))
    with pytest.raises(RunError, match="c in the checkpoint is not what was trained"):
        refuse_other_file(tmp_path / "file", checksums({**tensors, "c": tensors["c"].conj()}))
    with pytest.raises(RunError, match=r"s@sparse_coo\.values in the checkpoint"):
        refuse_other_file(tmp_path / "file", checksums({**tensors, "s": 2 * tensors["s"]}))


def test_a_checkpoint_is_proven_in_a_folder_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / b"caf\xe9".decode("utf-8", "surrogateescape")
    folder.mkdir()
    tensors = {"w": torch.arange(5.0)}
    Snapshot.of(tensors).write(folder / "file")
    refuse_other_file(folder / "file", checksums(tensors))
    with pytest.raises(RunError, match="w in the checkpoint is not what was trained"):
        refuse_other_file(folder / "file", checksums({"w": -tensors["w"]}))
