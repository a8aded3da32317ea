"""A checkpoint of an earlier version, in which the replicas of a stage wrote a part of its file each, is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models.weights import begun
from support.pipelines import Captured, Pipeline, build, captured_file, minibatches, plan_for

from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.directory import directory_of

SUPPORT = Path(__file__).parents[3] / "support"
# two stages of net.py after 5 steps, the first with two replicas
FOLDER = SUPPORT / "split_checkpoint"
STEP = 5


@pytest.fixture(scope="module")
def network() -> Captured:
    return captured_file(SUPPORT / "earlier_checkpoint" / "net.py", (), 8)


def stored() -> dict[str, torch.Tensor]:
    """Return the tensors of all files."""
    return {name: tensor for path in FOLDER.glob("*.safetensors") for name, tensor in load_file(path).items()}


def pipeline(network: Captured, stages: int, folder: Path, **job: Any) -> Pipeline:
    return build(network, plan_for(network, stages, "1f1b", 4, 8), folder, **job)


def add_to(built: Pipeline) -> None:
    """Copy the checkpoint into a run, as one of its model: the digest of a graph may change with the version."""
    folder = directory_of(built.run.checkpoints, STEP)
    shutil.copytree(FOLDER, folder)
    document = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    document["graph_digest"] = built.context.graph.model_digest
    del document["digest"]
    (folder / "manifest.json").write_text(json.dumps(document), encoding="utf-8")


def test_every_tensor_is_read_from_its_file() -> None:
    checkpoint = Checkpoint(FOLDER)
    checkpoint.verify()
    assert len([stage for stage in checkpoint.stages if stage.state is None]) == 1  # of the second replica
    expected = stored()
    tensors = checkpoint.read(list(checkpoint.names))
    assert tensors.keys() == expected.keys() == checkpoint.shapes().keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []


def test_a_run_resumes_from_it_at_any_number_of_stages(network: Captured, tmp_path: Path) -> None:
    weights = []
    for stages in (1, 2, 3):
        built = pipeline(network, stages, tmp_path / f"{stages}", ema=0.9, start_step=STEP)
        add_to(built)
        weights.append(built.weights(built.train(minibatches(network.workload, STEP + 2, 8))))
    first, *others = weights
    assert all(torch.equal(other[name], tensor) for other in others for name, tensor in first.items())
    assert not torch.equal(first["a.weight"], stored()["model.a.weight"])


def test_another_run_starts_from_its_weights(network: Captured, tmp_path: Path) -> None:
    weights = begun(pipeline(network, 2, tmp_path), FOLDER)
    assert len(weights) == 6
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, stored()[f"model.{name}"])] == []
