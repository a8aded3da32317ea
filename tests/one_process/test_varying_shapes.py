"""Batches whose sequences are of different lengths, and images of different sizes, train as a plain loop does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracle import train as plain
from pipelines import Pipeline, build, captured_file, plan_for
from trace_cases import Toy

from autopipe.errors import RunError, WorkerError
from autopipe.runtime.events import Silent
from autopipe.trace import capture

MODELS = Path(__file__).resolve().parents[1] / "shape_models"
# how many further shapes need stage code of their own; GPT slices a table, so no longer sequence could be tried
FURTHER = {"gpt": 1, "lstm": 0, "hf_gpt2": 0, "conv": 2}


class Notes(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def event(self, kind: str, **fields: str) -> None:
        if kind == "note":
            self.texts.append(fields["text"])


def pipeline_of(name: str, num_stages: int, folder: Path, schedule: str = "1f1b", **job: int) -> Pipeline:
    made = captured_file(MODELS / f"{name}.py")
    return build(made, plan_for(made, num_stages, schedule, 3, 6), folder, **job)


def trained_like_a_plain_loop(name: str, pipeline: Pipeline) -> list[str]:
    """Train over the model's own data both ways, compare every bit, and return the messages of rank 0."""
    items = list(pipeline.captured.workload.items(6))
    reporters = [Notes() for _ in pipeline.plan.stages]
    sessions = pipeline.train(items, reporters=reporters)
    losses, model, _ = plain(MODELS / f"{name}.py", items, 3)
    stepper, ours = sessions[0].executor.stepper, pipeline.weights(sessions)
    assert [stepper.losses[step] for step in range(len(items))] == losses
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(ours.get(key, value), value), key
    return reporters[0].texts


@pytest.mark.parametrize("name", sorted(FURTHER))
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_training_over_mixed_shapes_is_the_plain_loop(name: str, num_stages: int, tmp_path: Path) -> None:
    notes = trained_like_a_plain_loop(name, pipeline_of(name, num_stages, tmp_path))
    assert len(notes) == FURTHER[name]
    assert all("stage code made for another shape" in note for note in notes)
