"""A forward that changes its batch is refused if the data yields the same memory again."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from autopipe.cli.main import autopipe

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
    def forward(self, x):
        {change}
        return self.last(torch.tanh(self.first(x)))

def build_model():
    return Net()

def loss(output, target):
    return (output - target).square().mean()

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
BATCHES = [(part, torch.ones(4, 1)) for part in X.split(4)]

def data():
    return {data}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(folder: Path, change: str, data: str) -> tuple[int, str]:
    (folder / "model.py").write_text(MODEL.format(change=change, data=data))
    words = ["check", "model.py", "--gpus", "1", "--num-microbatches", "2", "--microbatch-sizes", "2", "--steps", "1"]
    result = CliRunner().invoke(autopipe, words)
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("data", ["BATCHES", "((x[:], y) for x, y in BATCHES)"])
def test_data_that_the_forward_changes_is_refused_with_the_line(folder: Path, data: str) -> None:
    code, output = checked(folder, "x.mul_(0.5)", data)
    assert code == 1
    assert "the forward changes x in place, and data yields the same memory in every epoch" in output
    assert "x.mul_(0.5)" in output or "model.py:10" in output


@pytest.mark.parametrize(
    ("change", "data"),
    [
        ("x = x * 0.5", "BATCHES"),
        ("x.mul_(0.5)", "((x.clone(), y) for x, y in BATCHES)"),
        ("x.mul_(0.5)", "torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, X[:, :1]), 4)"),
    ],
)
def test_data_that_the_forward_does_not_change_is_accepted(folder: Path, change: str, data: str) -> None:
    code, output = checked(folder, change, data)
    assert (code, "equal" in output) == (0, True), output
