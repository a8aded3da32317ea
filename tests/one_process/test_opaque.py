"""Modules that run as they are: whatever they call in a batch, training in stages is plain training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from opaque_cases import CASES, write
from oracle import by_owner
from oracle import train as plain
from pipelines import build, captured_file, minibatches, plan_for

OPAQUE = {
    "experts": ("blocks.0.moe", "blocks.1.moe", "blocks.2.moe"),
    "layer_drop": ("stack", "other"),
    "statistics": ("one", "two"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("opaque")


def assert_same(ours: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.usefixtures("one_thread")
def test_the_weights_are_those_of_a_plain_loop(name: str, schedule: str, folder: Path, tmp_path: Path) -> None:
    path = write(name, folder)
    made = captured_file(path)
    assert made.workload.spec.opaque_modules == OPAQUE[name]
    pipeline = build(made, plan_for(made, 3, schedule, 4, 8), tmp_path)
    items = minibatches(made.workload, 5, 8, last=7)
    sessions = pipeline.train(items)
    stages = [stage.parameters for stage in pipeline.plan.stages]
    staleness = by_owner(stages, [1] * 3) if schedule == "2bw" else lambda name: 0
    losses, model, _ = plain(path, items, 4, staleness=staleness, opaque=OPAQUE[name])
    assert [sessions[0].executor.stepper.losses[step] for step in range(5)] == losses
    assert_same(pipeline.weights(sessions), model)
