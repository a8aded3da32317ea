"""Check and profile use no microbatch of one sample if the model does not accept it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8, track_running_stats={tracked})

    def forward(self, x):
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        {between}
        for layer in self.layers[2:]:
            x = torch.tanh(layer(x))
        return x

def build_model():
    return Net()

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        yield torch.randn(batch_size, 8, generator=g), torch.randn(batch_size, 8, generator=g)

def loss(output, target):
    loss = (output - target).pow(2).mean()
    {loss}
    return loss
"""
NEEDS_TWO = 'raise ValueError("needs two samples")'
KINDS = {
    "batch norm": ("x = self.norm(x)", ""),
    "batch norm without statistics": ("x = self.norm(x)", ""),
    "functional batch norm": ("x = F.batch_norm(x, None, None, training=True)", ""),
    "a forward that raises": (f"if x.shape[0] < 2: {NEEDS_TWO}", ""),
    "a loss that raises": ("", f"if output.shape[0] < 2: {NEEDS_TWO}"),
    "a standard deviation": ("", "loss = loss + output.std(0).mean()"),
}
SIZES = ["--gpus", "2", "--device", "cpu", "--schedule", "1f1b", "--replicas", "never"]


def write(folder: Path, kind: str) -> None:
    between, loss = KINDS[kind]
    text = MODEL.replace("{between}", between).replace("{loss}", loss)
    (folder / "net.py").write_text(text.replace("{tracked}", str("without" not in kind)))


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_of_two_are_compared_if_one_sample_is_not_accepted(run: Any, tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    done = run("check", "net.py", *SIZES, "--batch-size", "6", "--num-microbatches", "3", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["bitwise"]
    assert "microbatch of 1" not in done.stderr


@pytest.mark.parametrize("kind", ["batch norm", "a loss that raises"])
def test_a_microbatch_that_the_model_does_not_accept_is_reported(run: Any, tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    words = ["check", "net.py", *SIZES, "--batch-size", "4"]
    done = run(*words, "--num-microbatches", "4", "--json")
    error = json.loads(done.stdout)["error"]
    assert error["what"].startswith(
        "splitting 4 samples into 4 microbatches gives a microbatch of 1 sample, which the model does not accept: "
    )
    assert error["try"].startswith("--num-microbatches 2: the model accepts microbatches of 2 samples")
    done = run(*words, *error["try"].partition(":")[0].split(), "--json")
    assert json.loads(done.stdout)["bitwise"]


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("kind", ["batch norm", "a forward that raises"])
def test_the_planner_chooses_no_microbatch_that_the_model_does_not_accept(run: Any, tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    done = run("check", "net.py", *SIZES, "--batch-size", "6", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["bitwise"]
    profile = json.loads((tmp_path / ".autopipe" / "profile.json").read_text())
    assert min(entry["microbatch_size"] for entry in profile["measurements"]) == 2
    assert "only microbatches of at least 2 samples are measured: the model does not accept" in done.stderr
