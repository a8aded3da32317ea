"""Batches with sequences of different lengths or images of different sizes train as in a plain loop."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.oracle import load, samples
from support.oracle import train as plain
from support.pipelines import Pipeline, build, captured_file, plan_for
from support.schedule_cases import recomputing

from autopipe.errors import RunError
from autopipe.runtime.events import Silent
from autopipe.verify.check import staleness

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = Path(__file__).resolve().parents[3] / "shape_models"
# the number of further shapes that need their own stage files; a symbolic length needs none
FURTHER = {"gpt": 0, "lstm": 0, "hf_gpt2": 0, "conv": 2}


def tokens(batch: dict[str, torch.Tensor]) -> int:
    """Count the targets of a language model: the labels shifted by one, without padding."""
    return int((batch["labels"][:, 1:] != -100).sum())


class Notes(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def event(self, kind: str, **fields: str) -> None:
        if kind == "note":
            self.texts.append(fields["text"])


def pipeline_of(name: str, num_stages: int, folder: Path, schedule: str = "1f1b", **job: int) -> Pipeline:
    subject = captured_file(MODELS / f"{name}.py")
    return build(subject, plan_for(subject, num_stages, schedule, 3, 6), folder, **job)


def trained_like_a_plain_loop(name: str, pipeline: Pipeline) -> list[str]:
    """Train in stages and in a plain loop, compare every bit, and return the messages of rank 0."""
    items = list(pipeline.captured.workload.items(6))
    reporters = [Notes() for _ in pipeline.plan.stages]
    sessions = pipeline.train(items, reporters=reporters)
    losses, model, _ = plain(MODELS / f"{name}.py", items, 3, divisor=tokens if name == "hf_gpt2" else samples)
    stepper, ours = sessions[0].executor.stepper, pipeline.weights(sessions)
    assert [stepper.losses[step] for step in range(len(items))] == losses
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(ours.get(key, value), value), key
    return reporters[0].texts


@pytest.mark.parametrize("name", sorted(FURTHER))
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_training_over_mixed_shapes_equals_the_plain_loop(name: str, num_stages: int, tmp_path: Path) -> None:
    notes = trained_like_a_plain_loop(name, pipeline_of(name, num_stages, tmp_path))
    assert len(notes) == FURTHER[name]
    assert all("generated stage code for a batch of another shape" in note for note in notes)


@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_stale_schedules_continue_across_a_change_of_shape(schedule: str, tmp_path: Path) -> None:
    pipeline = pipeline_of("conv", 2, tmp_path, schedule)
    items = list(pipeline.captured.workload.items(6))
    sessions = pipeline.train(items)
    delays = staleness(pipeline.context)
    losses, model, _ = plain(MODELS / "conv.py", items, 3, staleness=lambda name: delays.get(name, 0))
    assert any(delays.values())
    assert [sessions[0].executor.stepper.losses[step] for step in range(len(items))] == losses
    ours = pipeline.weights(sessions)
    assert all(torch.equal(ours[name], value) for name, value in model.named_parameters())


@pytest.mark.parametrize("mode", ["stage", "block"])
def test_recompute_follows_the_shape_of_the_forward(mode: str, tmp_path: Path) -> None:
    subject = captured_file(MODELS / "conv.py")
    plan = plan_for(subject, 2, "1f1b", 3, 6)
    plan = replace(plan, stages=tuple(recomputing(stage, mode, subject.capture.graph) for stage in plan.stages))
    assert len(trained_like_a_plain_loop("conv", build(subject, plan, tmp_path))) == 2


def test_more_shapes_than_the_limit_are_trained_with_one_warning(tmp_path: Path) -> None:
    notes = trained_like_a_plain_loop("conv", pipeline_of("conv", 2, tmp_path, max_shapes=1))
    (warning,) = (note for note in notes if note.startswith("warning"))
    assert re.search(r"another shape \(inputs: float32\[2, 3, 24, 24\].* 1 shape already", warning)
    assert "--max-shapes" in warning


def test_a_shape_that_the_model_does_not_accept_is_refused_with_its_line(tmp_path: Path) -> None:
    pipeline = pipeline_of("gpt", 2, tmp_path)
    ids = torch.zeros(6, 65, dtype=torch.int64)  # the table has 64 positions
    with pytest.raises(RunError, match=r"another shape .*int64\[2, 65\].* cannot run in these stages") as caught:
        pipeline.train([(ids, ids)])
    assert "self.places.weight" in caught.value.where


def test_the_code_of_another_shape_is_written_next_to_the_stage_files(tmp_path: Path) -> None:
    pipeline = pipeline_of("conv", 2, tmp_path)
    pipeline.train(list(pipeline.captured.workload.items(6)))
    folders = sorted(path.name for path in pipeline.run.stages.iterdir() if path.is_dir())
    assert folders == ["shape_1", "shape_2"]
    texts = [(pipeline.run.stages / folder / "stage_0.py").read_text() for folder in folders]
    assert [text.count("max_pool2d") for text in texts] == [1, 2]


def test_evaluation_accepts_other_shapes(tmp_path: Path) -> None:
    pipeline = pipeline_of("gpt", 2, tmp_path, evaluate_every=1)
    events: list[float] = []

    class Losses(Silent):
        def event(self, kind: str, **fields: float) -> None:
            if kind == "evaluation":
                events.append(fields["loss"])

    items = list(pipeline.captured.workload.items(6))
    sessions = pipeline.train(items[:1], reporters=[Losses(), Silent()])
    _, model, _ = plain(MODELS / "gpt.py", items[:1], 3)
    model.eval()
    module = load(MODELS / "gpt.py")
    with torch.no_grad():
        parts = [[(ids[i : i + 2], ids[i : i + 2]) for i in (0, 2, 4)] for ids, _ in items]
        losses = [sum(float(module.loss(model(x), y)) for x, y in item) / 3 for item in parts]
    lengths = [ids.shape[1] - 1 for ids, _ in items]  # the mean over all targets, of which a longer batch has more
    mean = sum(loss * length for loss, length in zip(losses, lengths, strict=True)) / sum(lengths)
    assert events == [pytest.approx(mean, rel=1e-6)]
    assert all(runner.stage.training for session in sessions for runner in session.executor.runners.values())
