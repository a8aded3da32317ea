"""Hooks that observe a run, and its metrics files, in complete runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from autopipe import Pipeline
from autopipe.errors import ModelFileError

pytestmark = pytest.mark.timeout(240)
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
    def forward(self, x):
        return self.last(torch.relu(self.first(x)))

def loss(output, target):
    return (output - target).pow(2).mean()

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for _ in range(16):
        yield torch.randn(batch_size, 8, generator=g), torch.randn(batch_size, 1, generator=g)

evaluate_data = data

def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
"""
STOPS = """
def on_evaluate(step, metrics):
    with open("evaluations", "a") as file:
        file.write(f"{step} {metrics['evaluation_loss']!r}\\n")
    return "stop" if step >= 4 else None
"""


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL + STOPS)
    return Pipeline("model.py", gpus=2, replicas="never", microbatch_sizes=(2,), threads_per_rank=1, device="cpu")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_hook_stops_the_run_with_a_checkpoint_and_resume_continues_it(pipe: Pipeline, tmp_path: Path) -> None:
    options: dict[str, Any] = {"run_dir": "run", "check": False, "eval_every": 2, "clip_grad_norm": 1.0}
    stopped = pipe.train(steps=100_000, audit_every=0, **options)
    assert stopped.stopped_by == "on_evaluate of model.py" and not stopped.stopped
    assert 4 <= stopped.steps < 100_000 and Path(stopped.checkpoint).name == f"step-{stopped.steps:08}"
    first = rows(tmp_path)
    losses = [row["loss"] for row in first if "loss" in row]
    evaluations = {row["step"]: row["evaluation_loss"] for row in first if "evaluation_loss" in row}
    assert tuple(losses) == stopped.losses
    called = [line.split() for line in (tmp_path / "evaluations").read_text().splitlines()]
    assert {int(step): float(loss) for step, loss in called} == evaluations
    assert [row["learning_rate"] for row in first if "loss" in row][:4] == [1e-3, 1e-3, 5e-4, 5e-4]
    assert all(row["gradient_norm"] > 0 and row["skipped"] is False for row in first if "loss" in row)

    seen: list[tuple[int, float]] = []  # a local function, in this process
    end = stopped.steps + 2
    again = pipe.train(
        steps=end, resume=True, on_step=lambda step, m: seen.append((step, m["loss"])),
        on_evaluate=lambda step, m: None, **options,
    )  # fmt: skip
    assert not again.stopped_by and not again.stopped and again.step == end
    assert seen == [(stopped.steps + n, loss) for n, loss in enumerate(again.losses)]
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        table = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file) if row["loss"]]
    assert table == list(enumerate(stopped.losses + again.losses))


def test_an_exception_of_a_hook_ends_the_run_after_a_checkpoint(pipe: Pipeline, tmp_path: Path) -> None:
    def on_step(step: int, metrics: dict[str, Any]) -> None:
        if step == 3:
            raise LookupError("no such column")  # in the test

    with pytest.raises(ModelFileError, match=r"on_step.* failed: LookupError: no such column") as caught:
        pipe.train(steps=100_000, run_dir="run", check=False, on_step=on_step)
    assert caught.value.where.endswith("# in the test") and __file__ in caught.value.where
    steps = [row["step"] for row in rows(tmp_path) if "loss" in row]
    assert steps == list(range(len(steps))) and 4 <= len(steps) < 100_000
    assert (tmp_path / "run" / "checkpoints" / f"step-{len(steps):08}").is_dir()
