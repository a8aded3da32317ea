"""Complete runs in processes: their weights equal a plain loop's, even after a restart with another plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.oracle import train as plain
from support.pipelines import minibatches
from support.samples import SAMPLES

from autopipe.commands.settings import (
    EvaluateSettings,
    ExportSettings,
    ModelSettings,
    PlanSettings,
    ProfileSettings,
    TrainSettings,
)
from autopipe.commands.training import runs
from autopipe.errors import ArtifactError, RunError
from autopipe.ir import artifact
from autopipe.ir.timeline import Timeline
from autopipe.report.results import TrainResult
from autopipe.runtime.stage_runner import StageRunner
from autopipe.workload import LoadOptions, load_workload

SMALL = {"blocks": "2", "width": "32", "dropout": "0.1"}


def train(folder: Path, target: Path, *, gpus: int, steps: int, schedule: str = "1f1b", **more: Any) -> TrainResult:
    arguments = SMALL if target.stem == "gpt" else {}
    profile = ProfileSettings(
        ModelSettings(str(target), arguments=arguments), work_dir=folder / "work", device="cpu", microbatch_sizes=(2,)
    )
    plan = PlanSettings(profile, gpus=gpus, replicas="never", batch_size=6, schedule=schedule, num_microbatches=4)

    def ignore(kind: str, fields: Mapping[str, Any]) -> None:
        pass

    return runs.train(TrainSettings(plan, steps=steps, run_dir=folder / "run", **more), ignore)


@pytest.mark.parametrize(
    ("sample", "gpus", "schedule"), [("gpt", 3, "1f1b"), ("resnet", 2, "gpipe"), ("unet", 4, "1f1b")]
)
def test_the_exported_weights_are_those_of_the_plain_loop(
    sample: str, gpus: int, schedule: str, tmp_path: Path
) -> None:
    target = SAMPLES / f"{sample}.py"
    result = train(tmp_path, target, gpus=gpus, steps=5, schedule=schedule)
    arguments = {"blocks": 2, "width": 32, "dropout": 0.1} if sample == "gpt" else {}
    items = minibatches(load_workload(LoadOptions(str(target), arguments=SMALL if sample == "gpt" else {})), 5, 6)
    torch.set_num_threads(1)
    losses, model, _ = plain(target, items, 4, arguments=arguments)
    assert list(result.losses) == losses
    for name in ("model.safetensors", "model.pt"):
        exported = runs.export(ExportSettings(tmp_path / name, run=tmp_path / "run"))
        read = load_file(exported.path) if name.endswith("safetensors") else torch.load(exported.path)
        expected = model.state_dict()
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[key], expected[key]) for key in expected)
        model.load_state_dict(read, strict=True)


def test_a_run_resumed_with_another_plan_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    target = SAMPLES / "gpt.py"
    whole = train(tmp_path / "whole", target, gpus=2, steps=6)
    first = train(tmp_path / "parts", target, gpus=3, steps=2)
    second = train(tmp_path / "parts", target, gpus=2, steps=4, schedule="gpipe", resume=True)
    third = train(tmp_path / "parts", target, gpus=1, steps=6, resume=True)
    assert first.losses + second.losses + third.losses == whole.losses
    weights = []
    for folder in ("whole", "parts"):
        path = runs.export(ExportSettings(tmp_path / f"{folder}.pt", run=tmp_path / folder / "run")).path
        weights.append(torch.load(path))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_checkpoints_are_written_during_training_and_the_oldest_removed(tmp_path: Path) -> None:
    result = train(tmp_path, SAMPLES / "resnet.py", gpus=2, steps=5, checkpoint_every=1, keep_checkpoints=2)
    files = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert files == ["latest", "step-00000004", "step-00000005"]
    assert result.checkpoint.endswith("step-00000005")


def test_a_directory_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    train(tmp_path, SAMPLES / "resnet.py", gpus=1, steps=1)
    with pytest.raises(RunError, match=r"already contains a run \(checkpoint of step 1\)") as caught:
        train(tmp_path, SAMPLES / "resnet.py", gpus=1, steps=1)
    assert "--resume" in caught.value.remedy


def test_evaluation_in_stages_equals_evaluation_of_the_model(tmp_path: Path) -> None:
    target = SAMPLES / "gpt.py"
    train(tmp_path, target, gpus=3, steps=2)
    evaluation = runs.evaluate(EvaluateSettings(run=tmp_path / "run", batch_size=50))
    workload = load_workload(LoadOptions(str(target), arguments=SMALL))
    model = workload.build_model()
    path = runs.export(ExportSettings(tmp_path / "model.pt", run=tmp_path / "run")).path
    model.load_state_dict(torch.load(path))
    model.eval()
    total = samples = 0.0
    with torch.no_grad():
        for item in workload.evaluation_items(50):
            total += float(workload.loss(model, item)[0]) * workload.num_samples(item)
            samples += workload.num_samples(item)
    assert evaluation.samples == samples == 256
    assert evaluation.loss == pytest.approx(total / samples, rel=1e-6)


def test_evaluation_does_not_change_the_run(tmp_path: Path) -> None:
    train(tmp_path, SAMPLES / "resnet.py", gpus=2, steps=2)
    before = {p: p.read_bytes() for p in (tmp_path / "run" / "checkpoints").rglob("*") if p.is_file()}
    first = runs.evaluate(EvaluateSettings(run=tmp_path / "run"))
    second = runs.evaluate(EvaluateSettings(run=tmp_path / "run"))
    assert first.loss == second.loss
    assert before == {p: p.read_bytes() for p in (tmp_path / "run" / "checkpoints").rglob("*") if p.is_file()}


def test_a_recorded_run_has_a_timeline_like_a_simulated_one(tmp_path: Path) -> None:
    train(tmp_path, SAMPLES / "resnet.py", gpus=2, steps=2, record_timeline=True)
    timeline = artifact.load(Timeline, tmp_path / "run" / "timeline.json", renew="autopipe train")
    assert timeline.source == "measured" and timeline.num_ranks == 2
    assert {span.instruction.op for span in timeline.spans} >= {"F", "B", "SF", "RF", "SB", "RB", "S"}
    assert 0 <= timeline.bubble_fraction < 1


def test_metrics_have_one_line_per_step(tmp_path: Path) -> None:
    result = train(tmp_path, SAMPLES / "resnet.py", gpus=2, steps=3)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "audit" not in line]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert tuple(line["loss"] for line in lines) == result.losses
    assert all(line["samples"] == 6 for line in lines)


def test_a_damaged_checkpoint_is_refused_with_its_file(tmp_path: Path) -> None:
    train(tmp_path, SAMPLES / "resnet.py", gpus=2, steps=1)
    file = next((tmp_path / "run" / "checkpoints" / "step-00000001").glob("stage-0*.safetensors"))
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ArtifactError, match="is not what was written: its SHA-256 differs"):
        train(tmp_path, SAMPLES / "resnet.py", gpus=2, steps=2, resume=True)


def test_evaluation_while_training_changes_nothing_but_the_metrics(tmp_path: Path) -> None:
    plainly = train(tmp_path / "without", SAMPLES / "resnet.py", gpus=2, steps=4)
    evaluated = train(tmp_path / "with", SAMPLES / "resnet.py", gpus=2, steps=4, evaluate_every=2)
    assert plainly.losses == evaluated.losses
    lines = [json.loads(line) for line in (tmp_path / "with" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "evaluation_loss" in line] == [2, 4]
    last = next(line["evaluation_loss"] for line in reversed(lines) if "evaluation_loss" in line)
    evaluation = runs.evaluate(EvaluateSettings(run=tmp_path / "with" / "run"))
    assert evaluation.loss == pytest.approx(last, rel=1e-6)


def test_an_asynchronous_run_resumes_where_it_stopped(tmp_path: Path) -> None:
    target = SAMPLES / "resnet.py"
    whole = train(tmp_path / "whole", target, gpus=2, steps=6, schedule="2bw")
    first = train(tmp_path / "parts", target, gpus=2, steps=3, schedule="2bw")
    second = train(tmp_path / "parts", target, gpus=3, steps=6, schedule="2bw", resume=True)
    assert first.losses + second.losses == whole.losses


def test_a_new_plan_is_compared_with_plain_training_once(tmp_path: Path) -> None:
    train(tmp_path, SAMPLES / "resnet.py", gpus=2, steps=3)
    checked = (tmp_path / "work" / "checked").read_text().splitlines()
    assert len(checked) == 1
    train(tmp_path, SAMPLES / "resnet.py", gpus=2, steps=4, resume=True)
    assert (tmp_path / "work" / "checked").read_text().splitlines() == checked


def test_a_plan_that_differs_from_plain_training_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halved(self: StageRunner, outputs: Mapping[str, torch.Tensor], factor: float) -> torch.Tensor:
        return outputs[self.stage.RETURNS[0]] * factor * 0.5

    monkeypatch.setattr(StageRunner, "_scaled", halved)
    with pytest.raises(RunError, match="training in stages differs from plain training") as caught:
        train(tmp_path, SAMPLES / "resnet.py", gpus=2, steps=1)
    assert "--no-check" not in str(caught.value) and "report" not in caught.value.remedy
    assert "the loss of the first step is" in caught.value.what
    assert "resnet.py:" in caught.value.where
    assert not (tmp_path / "work" / "checked").exists()


def test_a_run_can_be_exported_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text((SAMPLES / "resnet.py").read_text())
    monkeypatch.chdir(tmp_path)
    train(tmp_path, Path("net.py"), gpus=2, steps=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert runs.export(ExportSettings(Path("net.pt"), run=tmp_path / "run")).step == 1
    assert runs.evaluate(EvaluateSettings(run=tmp_path / "run")).step == 1


def test_training_starts_from_exported_weights_at_any_number_of_ranks(tmp_path: Path) -> None:
    target = SAMPLES / "gpt.py"
    train(tmp_path / "before", target, gpus=2, steps=2)
    weights = tmp_path / "hf"
    runs.export(ExportSettings(weights, run=tmp_path / "before" / "run", format="hf"))
    one, three = (train(tmp_path / str(n), target, gpus=n, steps=2, init_from=weights).losses for n in (1, 3))
    assert one == three
    assert one[0] < train(tmp_path / "fresh", target, gpus=1, steps=1).losses[0]
    with pytest.raises(RunError, match="the weights lack"):
        train(tmp_path / "other", SAMPLES / "resnet.py", gpus=1, steps=1, init_from=weights)


def test_a_schedule_with_stale_weights_needs_a_checkpoint_with_them(tmp_path: Path) -> None:
    target = SAMPLES / "resnet.py"
    train(tmp_path, target, gpus=2, steps=2)
    with pytest.raises(RunError, match=r"2bw needs \S+ after step 1, which the checkpoint does not have") as caught:
        train(tmp_path, target, gpus=2, steps=3, schedule="2bw", resume=True)
    assert "--schedule 1f1b" in caught.value.remedy
    assert train(tmp_path, target, gpus=2, steps=3, schedule="gpipe", resume=True).step == 3
