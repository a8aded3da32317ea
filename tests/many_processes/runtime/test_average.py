"""Through the command line: averaged weights are trained, resumed, exported, evaluated, and equal a plain script's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.commands import Commands

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 8))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight
    def forward(self, ids):
        return self.head(self.body(self.words(ids)))

def build_model():
    return Net()

loss = nn.CrossEntropyLoss()

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.5)

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for _ in range(12):
        yield torch.randint(0, 16, (batch_size,), generator=g), torch.randint(0, 16, (batch_size,), generator=g)

evaluate_data = data
"""
FILES = {"model.py": MODEL}


def test_averaged_weights_work_with_every_command(commands: Commands, tmp_path: Path, monkeypatch) -> None:
    words = ["model.py", "--gpus", "2", "--device", "cpu", "--batch-size", "8", "--num-microbatches", "4"]
    words += ["--exact-ties", "always"]
    checked = commands.document("check", *words, "--ema", "0.8")
    assert checked["bitwise"] and "ema.words.weight" in {entry["name"] for entry in checked["parameters"]}
    commands.run("train", *words, "--ema", "0.8", "--steps", "3", "--run-dir", "run")
    commands.run("train", *words, "--steps", "6", "--run-dir", "run", "--resume")  # the decay of the run
    commands.run("export", "run", "-o", "last.safetensors")
    commands.run("export", "run", "-o", "averaged.safetensors", "--ema")
    for arguments in (["last.safetensors"], ["averaged.safetensors", "--ema"]):
        printed = commands.plain_loop(*arguments, steps=6)
        assert printed.endswith("11 of 11 tensors are equal, bit for bit\n")
    last, averaged = (load_file(tmp_path / f"{name}.safetensors") for name in ("last", "averaged"))
    assert torch.equal(averaged["head.weight"], averaged["words.weight"])
    assert not torch.equal(averaged["words.weight"], last["words.weight"])
    assert torch.equal(averaged["body.2.running_mean"], last["body.2.running_mean"])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    import model as users

    for weights, flag in ((last, []), (averaged, ["--ema"])):
        net = users.build_model()
        net.load_state_dict(weights, strict=True)
        net.eval()
        ids, target = (torch.cat([item[i] for item in users.data(8)]) for i in (0, 1))
        with torch.no_grad():
            expected = float(users.loss(net(ids), target))
        assert commands.document("eval", "run", *flag)["loss"] == pytest.approx(expected, rel=1e-5)
    commands.run("train", *words, "--ema", "0", "--steps", "7", "--run-dir", "run", "--resume")
    _, err = commands.run("export", "run", "-o", "none.safetensors", "--ema", code=1)
    assert "has no averaged weights" in err and not (tmp_path / "none.safetensors").exists()
    commands.run("export", "run", "--step", "6", "-o", "six.safetensors", "--ema")
