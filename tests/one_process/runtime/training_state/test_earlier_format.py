"""A checkpoint that was written before states were state dicts is read: as the run that wrote it had it."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from autopipe.errors import ArtifactError, RunError
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.training_state.stage import Training, edits, restore_training

FOLDER = Path(__file__).parents[3] / "support" / "earlier_checkpoint"  # two stages of net.py, after 5 steps


def trainings(*prefixes: str) -> list[Training]:
    """Build what the hooks of the file build for stages with the parameters of some layers."""
    spec = importlib.util.spec_from_file_location("net", FOLDER / "net.py")
    assert spec is not None and spec.loader is not None
    net = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(net)
    named = dict(net.build_model().named_parameters())
    owned = [{name: p for name, p in named.items() if name[0] in prefix} for prefix in prefixes]
    optimizers = [net.optimizer(own.items()) for own in owned]
    return [Training(own, opt, net.scheduler(opt)) for own, opt in zip(owned, optimizers, strict=True)]


def build(owned: Sequence[str]) -> Training:
    """Build what the hooks of the file build for some parameters."""
    return trainings("".join({name[0] for name in owned}))[0]


def test_the_hooks_are_those_of_the_run() -> None:
    assert edits(Checkpoint(FOLDER), build, rates=True) == {}


@pytest.mark.parametrize("stages", [("ab", "c"), ("abc",), ("a", "b", "c")], ids=str)
def test_every_value_is_restored_at_any_number_of_stages(stages: tuple[str, ...]) -> None:
    stored = load_file(FOLDER / "stage-0-of-2.safetensors") | load_file(FOLDER / "stage-1-of-2.safetensors")
    for training in trainings(*stages):
        restore_training(Checkpoint(FOLDER), training)
        for name, parameter in training.owned.items():
            state = training.optimizer.state[parameter]
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
            for key, tensor in state.items():
                assert torch.equal(tensor, stored[f"optimizer.state[{name}]['{key}']"])
        rate = stored["optimizer.defaults['lr']@0"]
        groups = training.optimizer.param_groups
        assert all(torch.equal(group["lr"], rate) and group["lr"] is groups[0]["lr"] for group in groups)
        scheduler: Any = training.scheduler
        assert scheduler.last_epoch == 5
        assert [own.calls for own in scheduler._schedulers[1].lr_lambdas] == [8] * len(groups)


def changed(tmp_path: Path, old: str, new: str) -> Checkpoint:
    shutil.copytree(FOLDER, tmp_path / "changed")
    path = tmp_path / "changed" / "manifest.json"
    text = path.read_text(encoding="utf-8")
    assert old in text
    manifest = json.loads(text.replace(old, new))
    del manifest["digest"]  # so that the change is not seen by it
    path.write_text(json.dumps(manifest), encoding="utf-8")
    return Checkpoint(path.parent)


def test_an_edited_hook_is_seen(tmp_path: Path) -> None:
    differences = edits(changed(tmp_path, '"weight_decay":0.3', '"weight_decay":0.5'), build, rates=True)
    assert differences == {"optimizer.param_groups[0]['weight_decay']": "was 0.5 and is 0.3"}


def test_an_optimizer_that_is_not_of_torch_is_refused_with_a_way_out(tmp_path: Path) -> None:
    (training,) = trainings("ab")
    with pytest.raises(RunError, match=r"lion\.Lion in a checkpoint of an earlier version") as caught:
        restore_training(changed(tmp_path, "torch.optim.adamw.AdamW", "lion.Lion"), training)
    assert "--init-from" in (caught.value.remedy or "")


@pytest.mark.parametrize("kind", ["groups", "by_parameter", "dict", "object"])
def test_a_damaged_state_is_an_error(tmp_path: Path, kind: str) -> None:
    (training,) = trainings("ab")
    with pytest.raises((ArtifactError, RunError)):
        restore_training(changed(tmp_path, f'{{"is":"{kind}"', '{"is":"list"'), training)
