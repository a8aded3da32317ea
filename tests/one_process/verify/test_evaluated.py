"""A check evaluates a minibatch in stages, and steps that a loss scale skips do not count."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipelines import build, captured, minibatches, plan_for

from autopipe.runtime.session import RankSession
from autopipe.runtime.step.gradients import GradientFinisher
from autopipe.verify.check import compare
from autopipe.verify.comparison import Comparison


def compared(folder: Path) -> Comparison:
    subject = captured("gpt")
    pipeline = build(subject, plan_for(subject, 2, "2bw", 4, 6), folder, steps=3)
    items = minibatches(subject.workload, 3, 6)
    return compare(subject.workload, pipeline.run, pipeline.job, pipeline.context, items, draws=True, evaluate=True)


@contextlib.contextmanager
def in_train_mode(self: RankSession) -> Any:
    with torch.no_grad():
        yield


@contextlib.contextmanager
def left_in_evaluation_mode(self: RankSession) -> Any:
    for runner in self.executor.runners.values():
        runner.versions.use(runner.versions.newest)
        runner.stage.eval()
    with torch.no_grad():
        yield


def test_an_evaluation_is_that_of_the_model(tmp_path: Path) -> None:
    comparison = compared(tmp_path)
    assert comparison.equal
    assert len({*comparison.evaluation}) == 1
    assert comparison.evaluation[0] != comparison.losses[0]


@pytest.mark.parametrize("wrong", [in_train_mode, left_in_evaluation_mode])
def test_a_wrong_evaluation_is_a_difference(
    wrong: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankSession, "_eval_mode", wrong)
    assert not compared(tmp_path).equal


COUNTS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        self.calls += 1
        return self.b(self.a(x).tanh())

build_model, loss = Net, nn.MSELoss

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield torch.randn(batch_size, 4, generator=g), torch.randn(batch_size, 1, generator=g)

evaluate_data = data
"""


def test_a_buffer_that_evaluations_change_is_no_difference(run: Any, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(COUNTS)
    done = run(
        "check", "net.py", "--gpus", "2", "--device", "cpu", "--replicas", "never", "--batch-size", "8", "--json"
    )
    assert done.exit_code == 0 and json.loads(done.stdout)["bitwise"], done.stderr


LARGE = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

def loss(output, target):
    return FACTOR * ((output - target) ** 2).mean()

def data(batch_size=4):
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        yield torch.randn(batch_size, 8, generator=generator), torch.randn(batch_size, 1, generator=generator)
"""


def checked(run: Any, factor: str) -> tuple[int, dict[str, Any]]:
    Path("net.py").write_text(LARGE.replace("FACTOR", factor))
    options = ["--gpus", "2", "--device", "cpu", "--precision", "fp16", "--num-microbatches", "2", "--json"]
    done = run("check", "net.py", *options)
    return done.exit_code, json.loads(done.stdout)


def test_a_comparison_goes_on_until_steps_were_taken(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, report = checked(run, "100")
    skipped = len(report["losses"]) - 3
    assert (code, report["equal"]) == (0, True)
    assert skipped > 2
    assert any(f"overflows in float16 in {skipped} of" in warning for warning in report["warnings"])
    original = GradientFinisher.finish

    def zeros(self: GradientFinisher, minibatch: int, owned: Any) -> Any:
        for parameter in (p for parameters in owned.values() for p in parameters.values() if p.grad is not None):
            parameter.grad.nan_to_num_(0.0, float("inf"), float("-inf")).masked_fill_(parameter.grad.isfinite(), 0.0)
        return original(self, minibatch, owned)

    monkeypatch.setattr(GradientFinisher, "finish", zeros)
    assert checked(run, "100")[0] == 1


def test_steps_that_are_all_skipped_prove_nothing(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, report = checked(run, "1e15")
    assert (code, report["equal"]) == (1, False)
    assert report["nonfinite"] == "all 3 steps overflow in float16 and are skipped"
