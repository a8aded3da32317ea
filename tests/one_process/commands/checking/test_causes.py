"""Refusals name the cause, the line and a remedy that trains the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.commands import stage_label

from autopipe.cli.main import autopipe
from autopipe.commands.checking import checking
from autopipe.commands.checking.task import Wanted
from autopipe.commands.prepared import Prepared
from autopipe.runtime.job import Job
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.step.stepper import Stepper
from autopipe.verify.comparison import Comparison

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        {init}
    def forward(self, x):
        {forward}
        h = self.a(x).tanh()
        h = self.b(h).tanh()
        h = self.c(h).tanh()
        return self.d(h) + x

def build_model():
    return Net()

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield torch.randn(batch_size, 6, generator=g), torch.randn(batch_size, 6, generator=g)

loss = nn.MSELoss()

def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1)
"""
WORDS = ["net.py", "--gpus", "2", "--device", "cpu", "--batch-size", "8", "--num-microbatches", "4"]


def checked(folder: Path, monkeypatch: pytest.MonkeyPatch, init: str = "pass", forward: str = "pass") -> dict:
    monkeypatch.chdir(folder)
    (folder / "net.py").write_text(MODEL.format(init=init, forward=forward))
    done = CliRunner().invoke(autopipe, ["check", *WORDS, "--json"])
    report = json.loads(done.stdout)
    assert done.exit_code == (0 if report["equal"] else 1)
    assert "report the model" not in done.output and "--no-check" not in done.output
    return report


PATH = """if not torch.compiler.is_compiling() and bool((x[:, 0] == 0).any()):
            x = x{change}"""


@pytest.mark.parametrize(("change", "is_equal"), [(" * 3 / 3", True), (" * 1.01", False)])
def test_another_path_may_round_differently_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, is_equal: bool
) -> None:
    """The model takes it in the second step only, with samples that the capture does not see."""
    monkeypatch.chdir(tmp_path)
    text = MODEL.format(init="pass", forward=PATH.format(change=change))
    text = text.replace("for _ in range(4):", "for step in range(4):")
    text = text.replace("yield torch.randn(batch_size, 6, generator=g)", "yield inputs(step, batch_size, g)")
    text += (
        "\ndef inputs(step, batch_size, g):\n    x = torch.randn(batch_size, 6, generator=g)\n"
        "    x[:, 0] = 0 if step == 1 else 1\n    return x\n"
    )
    (tmp_path / "net.py").write_text(text)
    report = json.loads(CliRunner().invoke(autopipe, ["check", *WORDS, "--json"]).stdout)
    assert (report["equal"], report["bitwise"]) == (is_equal, False)
    assert "the captured path differs" in json.dumps(report)


@pytest.mark.parametrize("options", [[], ["--deferred-batch-norm"]])
def test_statistics_of_batches_are_compared_as_they_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = MODEL.format(init="pass", forward="pass").replace("self.b(h)", "self.norm(self.b(h))")
    text = text.replace("range(4))\n", "range(4))\n        self.norm = nn.BatchNorm1d(6)\n", 1)
    (tmp_path / "net.py").write_text(text)
    jobs = []

    def record(prepared: Prepared, job: Job, items: Sequence[Any], wanted: Wanted) -> Comparison:
        jobs.append(job)
        return compared(prepared, job, items, wanted)

    compared = checking._compared
    monkeypatch.setattr(checking, "_compared", record)
    done = CliRunner().invoke(autopipe, ["check", *WORDS, *options, "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["bitwise"], done.output
    assert [job.deferred_batch_norm for job in jobs] == [bool(options)]


def test_a_parameter_in_the_memory_of_another_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = checked(tmp_path, monkeypatch, init="self.d.weight = nn.Parameter(self.a.weight.data.view(6, 6))")
    assert "parameters a.weight (stages [0]) and d.weight (stages [1]) share memory" in report["cause"]
    assert "one nn.Parameter in both places" in report["cause"]


def test_parameters_in_one_block_of_memory_without_overlap_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = "flat = torch.randn(72); self.a.weight = nn.Parameter(flat[:36].view(6, 6)); "
    report = checked(tmp_path, monkeypatch, init=flat + "self.d.weight = nn.Parameter(flat[36:].view(6, 6))")
    assert report["bitwise"] and not report["cause"]


def test_a_batch_changed_in_place_is_restored_for_the_compared_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checked(tmp_path, monkeypatch, forward="x.mul_(0.5)")["bitwise"]


def test_a_class_that_counts_its_objects_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init = "Net.built = getattr(Net, 'built', 0) + 1; self.d.number = Net.built"
    report = checked(tmp_path, monkeypatch, init, forward="x = x * self.d.number")
    assert "two builds of the model differ: d.number is" in report["cause"]
    assert "instead of counting objects in a class" in report["cause"]


def test_a_wrong_forward_is_distinguished_from_a_wrong_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        scaled = StageRunner._scaled
        patch.setattr(StageRunner, "_scaled", lambda self, outputs, factor: scaled(self, outputs, factor) * 0.5)
        report = checked(tmp_path, monkeypatch)
        assert "the loss of the first step is" in report["cause"]
        line = (tmp_path / "net.py").read_text().splitlines().index("        return self.d(h) + x") + 1
        assert "nearest to the loss that differs is d." in report["cause"]
        last = stage_label(tmp_path / ".autopipe", 1)
        assert f"net.py:{line}" in report["cause"] and f"of {last}" in report["cause"], report["cause"]
    with monkeypatch.context() as patch:
        step = Stepper.step

        def twice(self: Stepper, stage: int, minibatch: int) -> None:
            step(self, stage, minibatch)
            with torch.no_grad():
                for parameter in self.owned(stage).values():
                    parameter.mul_(1.001)

        patch.setattr(Stepper, "step", twice)
        assert "the optimizer's step in stages differs from plain training" in checked(tmp_path, monkeypatch)["cause"]
