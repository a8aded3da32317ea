"""Ranks as processes: batches of mixed shapes, and evaluation that uses another path through the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.oracle import load
from support.oracle import train as plain

from autopipe.commands.settings import (
    EvaluateSettings,
    ExportSettings,
    ModelSettings,
    PlanSettings,
    ProfileSettings,
    TrainSettings,
)
from autopipe.commands.training import runs
from autopipe.report.results import TrainResult
from autopipe.workload import LoadOptions, load_workload

MODELS = Path(__file__).resolve().parents[2] / "shape_models"


def train(name: str, folder: Path, gpus: int, notes: list[str], **more: Any) -> TrainResult:
    profile = ProfileSettings(
        ModelSettings(str(MODELS / f"{name}.py")), work_dir=folder / "work", device="cpu", microbatch_sizes=(2,)
    )
    plan = PlanSettings(profile, gpus=gpus, replicas="never", batch_size=6, schedule="1f1b", num_microbatches=3)

    def keep(kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "note":
            notes.append(fields["text"])

    return runs.train(TrainSettings(plan, epochs=1, run_dir=folder / "run", check_first=False, **more), keep)


def items_of(name: str) -> list[Any]:
    return list(load_workload(LoadOptions(str(MODELS / f"{name}.py"))).items(6))


@pytest.mark.parametrize(("name", "gpus", "further"), [("gpt", 2, 0), ("conv", 3, 2), ("lstm", 2, 0)])
def test_processes_train_over_mixed_shapes_like_a_plain_loop(
    name: str, gpus: int, further: int, tmp_path: Path
) -> None:
    notes: list[str] = []
    result = train(name, tmp_path, gpus, notes)
    torch.set_num_threads(1)
    losses, model, _ = plain(MODELS / f"{name}.py", items_of(name), 3)
    assert list(result.losses) == losses
    assert sum("generated stage code for a batch of another shape" in note for note in notes) == further
    exported = runs.export(ExportSettings(tmp_path / "model.safetensors", run=tmp_path / "run"))
    read, expected = load_file(exported.path), model.state_dict()
    assert all(torch.equal(read[key], expected[key]) for key in expected)


def test_evaluation_with_another_path_has_its_own_stage_files(tmp_path: Path) -> None:
    notes: list[str] = []
    train("drop_path", tmp_path, 2, notes, evaluate_every=2)
    assert any("eval mode traces differently" in note and "separate stage code" in note for note in notes)
    stage = (tmp_path / "work" / "stages" / "evaluation" / "stage_0.py").read_text()
    assert "rand" not in stage and "tanh" in stage
    torch.set_num_threads(1)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "evaluation_loss" in line] == [2, 4]
    for steps, loss in ((line["step"], line["evaluation_loss"]) for line in lines if "evaluation_loss" in line):
        assert loss == pytest.approx(evaluated(steps), rel=1e-6)
    again = runs.evaluate(EvaluateSettings(tmp_path / "run"))
    assert again.loss == pytest.approx(evaluated(4), rel=1e-6)


def evaluated(steps: int) -> float:
    """Return the loss of the model in evaluation mode after some plain steps."""
    items = items_of("drop_path")
    _, model, _ = plain(MODELS / "drop_path.py", items[:steps], 3)
    model.eval()
    loss = load(MODELS / "drop_path.py").loss
    with torch.no_grad():
        return sum(float(loss(model(features), target)) for features, target in items) / len(items)
