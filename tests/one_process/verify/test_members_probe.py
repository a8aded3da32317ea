"""Optimizers that look beyond each element are recognised before a team trains; all others are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from autopipe.cli.main import autopipe
from autopipe.verify import optimizer_probe
from autopipe.verify.optimizer_probe import probe_members
from autopipe.workload import LoadOptions, load_workload

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.norm = nn.Linear(6, 32), nn.Linear(32, 6), nn.LayerNorm(6)
    def forward(self, x):
        return self.norm(x + self.narrow(torch.relu(self.wide(x))))

def build_model():
    return Net()

def data(batch_size=8):
    while True:
        yield torch.randn(batch_size, 6), torch.zeros(batch_size, dtype=torch.long)

loss = nn.CrossEntropyLoss()

class Lamb(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(1e-2 * p.norm() / (p.grad.norm() + 1e-6) * p.grad)

def lamb(named):
    return Lamb([p for _, p in named])
"""
CUT = {"wide.weight": 0, "wide.bias": 0, "narrow.weight": 1}
ELEMENTWISE = "adamw", "adam", "sgd", "rmsprop", "adagrad", "nadam", "radam", "adamax", "asgd", "rprop", "adadelta"


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_accepted(
    name: str, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(optimizer_probe, "WHOLE_BYTES", 0)
        monkeypatch.setattr(optimizer_probe, "CUT", 4)
    (tmp_path / "net.py").write_text(MODEL)
    work = load_workload(LoadOptions(str(tmp_path / "net.py"), optimizer=name, lr=1e-3))
    assert probe_members(work, CUT, 2) is None


@pytest.mark.parametrize("name", ["adafactor", "lamb"])
def test_other_optimizers_are_found(name: str, tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    work = load_workload(LoadOptions(str(path), optimizer=f"{path}:lamb" if name == "lamb" else name))
    finding = probe_members(work, CUT, 2)
    assert finding is not None
    assert finding.parameter in CUT
    assert probe_members(work, {}, 2) is None


@pytest.mark.parametrize("words", [["check"], ["train", "--steps", "2"], ["train", "--steps", "2", "--no-check"]])
def test_a_team_refuses_them_by_name(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    options = ["net.py", "--gpus", "2", "--tensor-parallel", "2", "--device", "cpu", "--optimizer", "adafactor"]
    done = CliRunner().invoke(autopipe, [*words, *options])
    assert done.exit_code == 1
    text = " ".join((done.stdout + done.stderr).split())
    for part in ("the optimizer does not step each element on its own", "such as SGD, Adam", "--tensor-parallel"):
        assert part in text


def test_audits_are_refused_with_a_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    options = ["net.py", "--gpus", "2", "--tensor-parallel", "2", "--device", "cpu", "--steps", "2"]
    done = CliRunner().invoke(autopipe, ["train", *options, "--audit-every", "1"])
    assert done.exit_code == 1
    assert "--audit-every does not work with --tensor-parallel 2" in done.stderr
