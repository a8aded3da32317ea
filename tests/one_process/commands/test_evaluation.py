"""An evaluation that the ranks cannot run is refused before they start, with a remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.pipelines import build, captured_file, minibatches, plan_for

from autopipe.commands import stored_runs
from autopipe.commands.settings import EvaluateSettings, ModelSettings, PlanSettings, ProfileSettings, TrainSettings
from autopipe.commands.training import attempts, runs
from autopipe.errors import AutopipeError, ModelFileError, RunError

MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

def loss(output, target):
    return (output - target).pow(2).mean()

def data(batch_size=8):
    for _ in range(4):
        yield torch.ones(batch_size, 4), torch.ones(batch_size, 1)
"""


@pytest.fixture(autouse=True)
def no_rank_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attempts, stored_runs):
        monkeypatch.setattr(module, "run_ranks", lambda *request: pytest.fail("a rank was started"))


def refused(folder: Path, **more: Any) -> AutopipeError:
    """Train with --eval-every, and return the error."""

    def ignore(kind: str, fields: Mapping[str, Any]) -> None:
        pass

    model = ModelSettings(str(folder / "net.py"))
    profile = ProfileSettings(model, work_dir=folder / "work", device="cpu", microbatch_sizes=(2,))
    plan = PlanSettings(profile, gpus=2, replicas="never", batch_size=8, num_microbatches=4)
    with pytest.raises(AutopipeError) as caught:
        runs.train(TrainSettings(plan, steps=2, evaluate_every=1, run_dir=folder / "run", **more), ignore)
    assert not (folder / "run").exists()
    return caught.value


def test_training_with_evaluation_needs_evaluation_data(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    error = refused(tmp_path)
    assert isinstance(error, ModelFileError)
    assert "net.py:build_model has no evaluation data: looked for evaluate_data" in str(error)
    assert "define evaluate_data(batch_size) in the model file, or give --eval-data" in error.remedy


def test_training_whose_stages_cannot_evaluate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text(MODEL + "\nevaluate_data = data\n")
    monkeypatch.setattr(
        "autopipe.commands.artifact_steps.evaluation.record", lambda *arguments: "it keeps the mode of training"
    )
    error = refused(tmp_path)
    assert isinstance(error, RunError)
    assert error.what == "this model cannot be evaluated in stages: it keeps the mode of training"
    assert "omit --eval-every" in error.remedy


def test_eval_names_what_is_missing_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    subject = captured_file(tmp_path / "net.py")
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 4, 8), tmp_path / "run", save=True)
    pipeline.train(minibatches(subject.workload, 1, 8))
    with pytest.raises(ModelFileError, match="has no evaluation data: looked for evaluate_data"):
        stored_runs.evaluate(EvaluateSettings(tmp_path / "run"))
    with pytest.raises(ModelFileError, match="no_such"):
        stored_runs.evaluate(EvaluateSettings(tmp_path / "run", data=f"{tmp_path / 'net.py'}:no_such"))
    pipeline.run.write_job(replace(pipeline.run.job(), evaluation_note="it is so"))
    with pytest.raises(RunError, match="this model cannot be evaluated in stages: it is so"):
        stored_runs.evaluate(EvaluateSettings(tmp_path / "run"))
