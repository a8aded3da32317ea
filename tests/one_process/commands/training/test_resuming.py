"""The checkpoint that a run resumes from: damage is named, with the intact steps; another model is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.checkpoints import save
from torch import nn

from autopipe.commands.settings import ModelSettings, PlanSettings, ProfileSettings, TrainSettings
from autopipe.commands.training import runs
from autopipe.commands.training.checkpoints import chosen, newest_intact, refuse_other_model, refuse_other_parameters
from autopipe.errors import ArtifactError, RunError
from autopipe.ir.graph import Graph, Input
from autopipe.ir.tensor import TensorSpec
from autopipe.launch.request import LaunchSettings
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.directory import directory_of
from autopipe.runtime.checkpoint.state import restore_versions
from autopipe.runtime.job import RunDirectory
from autopipe.runtime.weights import WeightVersions


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    for step in (1, 2, 3, 4):
        save(directory.checkpoints, step)
    return directory


def damage_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text('{"kind": "Manifest"')
    return "it is not JSON"


def lose_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "there is no manifest.json"


def truncate(folder: Path) -> str:
    path = folder / "stage-1-of-2.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    return "stage-1-of-2.safetensors is not what was written"


def flip(folder: Path) -> str:
    path = folder / "stage-0-of-2.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))
    return "stage-0-of-2.safetensors is not what was written"


def lose(folder: Path) -> str:
    (folder / "stage-0-of-2.safetensors").unlink()
    return "stage-0-of-2.safetensors is missing"


def point_elsewhere(folder: Path) -> str:
    path = folder / "manifest.json"
    document = json.loads(path.read_text().replace("stage-0-of-2.safetensors", "../../../model.py"))
    document.pop("digest")  # as an attacker would do
    path.write_text(json.dumps(document))
    return "'../../../model.py' is not the name of a stage's file"


DAMAGES = (damage_manifest, lose_manifest, truncate, flip, lose, point_elsewhere)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_with_the_newest_intact_step(run: RunDirectory, damage) -> None:
    message = damage(directory_of(run.checkpoints, 4))
    with pytest.raises(ArtifactError) as caught:
        chosen(run, None)
    assert caught.value.exit_code == 1
    assert caught.value.what.startswith("the checkpoint of step 4 is damaged: ")
    assert message in caught.value.what
    assert "step-00000004" in caught.value.where
    assert caught.value.remedy == "--resume 3 (intact: 1, 2, 3)"
    assert chosen(run, 3).manifest.step == 3
    assert newest_intact(run) == 3


def test_a_run_without_an_intact_checkpoint_is_refused(run: RunDirectory) -> None:
    for step in (1, 2, 3, 4):
        truncate(directory_of(run.checkpoints, step))
    with pytest.raises(ArtifactError) as caught:
        chosen(run, 2)
    assert "no other checkpoint of this run is intact" in caught.value.remedy
    assert newest_intact(run) == -1


def test_a_step_that_was_not_saved_is_refused_with_the_saved_steps(run: RunDirectory) -> None:
    with pytest.raises(RunError, match="there is no checkpoint of step 9; there are 1, 2, 3, 4") as caught:
        chosen(run, 9)
    assert caught.value.remedy == "--resume 4"


def test_a_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="--resume: there is no checkpoint"):
        chosen(RunDirectory(tmp_path / "run"), None)


def graph_of(model: nn.Module) -> Graph:
    specs = {n: TensorSpec(tuple(p.shape), "float32", True) for n, p in model.named_parameters()}
    inputs = (Input("x", TensorSpec((), "float32", False)),)
    return Graph("net", inputs, (), (), ("x",), specs, {}, {})


def test_another_model_is_refused_with_its_first_parameter(run: RunDirectory) -> None:
    class Net(nn.Module):
        def __init__(self, *shapes: int, first: int = 0) -> None:
            super().__init__()
            for index, shape in enumerate(shapes, start=first):
                self.register_parameter(f"w{index}", nn.Parameter(torch.zeros(shape)))

    source = Checkpoint(directory_of(run.checkpoints, 4))
    for shapes, first, message in (
        ((3, 5), 0, r"w1 was \[3\] and is \[5\]"),
        ((3, 3, 2), 0, r"w2 \[2\] is new"),
        ((3,), 0, "w1 was removed"),
        ((3, 3), 0, r"the parameters are equal, the computation is not \(g -> "),
    ):
        with pytest.raises(RunError, match=f"the checkpoint belongs to another model: {message}"):
            refuse_other_model(source, graph_of(Net(*shapes, first=first)))
    graph = graph_of(Net(3, 3))
    refuse_other_parameters(graph, Net(3, 3), run.path)
    with pytest.raises(RunError, match=r"the model has changed since this run: w1 was \[3\] and is \[4\]"):
        refuse_other_parameters(graph, Net(3, 4), run.path)
    with pytest.raises(RunError, match="w1 was removed"):
        refuse_other_parameters(graph, Net(3), run.path)


def test_a_stage_without_parameters_counts_for_older_versions(run: RunDirectory) -> None:
    versions = WeightVersions(nn.ReLU(), 2)
    restore_versions(Checkpoint(directory_of(run.checkpoints, 4)), versions, 4)
    assert versions.versions == (2, 3, 4)
    versions.use(2)


def test_elastic_is_refused_if_a_cluster_decides_the_number_of_ranks(tmp_path: Path) -> None:
    plan = PlanSettings(ProfileSettings(ModelSettings("net.py"), work_dir=tmp_path))
    settings = TrainSettings(plan, elastic=True, launch=LaunchSettings(launcher="env"))
    with pytest.raises(RunError, match="where the cluster determines the number of ranks"):
        runs.train(settings, lambda kind, fields: None)
