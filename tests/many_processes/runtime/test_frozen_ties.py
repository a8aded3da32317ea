"""The command line with a frozen parameter that several stages read: train, resume, evaluate, export."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from support.commands import Commands
from support.oracle import train
from support.pipelines import minibatches

from autopipe.workload import LoadOptions, load_workload

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 16)
        self.words.weight.requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, ids):
        h = self.words(ids).mean(1)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return F.linear(h, self.words.weight)

def build_model():
    return Net()

def loss(output, target):
    return F.cross_entropy(output, target)

def data(batch_size=8):
    g = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randint(0, 11, shape, generator=g)
    return [(draw(batch_size, 4), draw(batch_size)) for _ in range(8)]

evaluate_data = data
"""
FILES = {"model.py": MODEL}


def test_train_resume_eval_and_export_with_a_shared_frozen_embedding(commands: Commands, tmp_path: Path) -> None:
    shape = ["model.py", "--device", "cpu", "--batch-size", "8", "--num-microbatches", "2", "--microbatch-sizes", "4"]
    words = ["train", *shape, "--schedule", "1f1b", "--run-dir", "run"]
    first = commands.document(*words, "--gpus", "2", "--steps", "3")
    ties = commands.document("plan", *shape, "--gpus", "2")["ties"]
    assert [entry["parameter"] for entry in ties] == ["words.weight"]
    second = commands.document(*words, "--gpus", "3", "--steps", "6", "--resume")
    items = minibatches(load_workload(LoadOptions(str(tmp_path / "model.py"))), 6, 8)
    losses, model, _ = train(tmp_path / "model.py", items, 2)
    assert first["losses"] + second["losses"] == losses
    commands.run("export", "run", "-o", "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(exported[name], parameter), name
    assert commands.document("eval", "run")["loss"] > 0
