"""Through the command line: a loss with parameters, named by an option, is trained, resumed, exported and loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.commands import Commands

MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 12))

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for _ in range(12):
        yield torch.randn(batch_size, 8, generator=g), torch.randint(0, 5, (batch_size,), generator=g)

evaluate_data = data
"""
LOSS = """
import torch
import torch.nn.functional as F
from torch import nn

class ArcFace(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(5, 12)), nn.Parameter(torch.tensor(1.0))
    def forward(self, output, target):
        return F.cross_entropy(self.scale.exp() * F.normalize(output) @ F.normalize(self.weight).T, target)
"""
FILES = {"model.py": MODEL, "arcface.py": LOSS}


def test_a_loss_with_parameters_works_with_every_command(commands: Commands, tmp_path: Path) -> None:
    words = ["model.py", "--gpus", "2", "--device", "cpu", "--batch-size", "8", "--num-microbatches", "4"]
    words += ["--loss", "arcface.py:ArcFace", "--lr", "0.05", "--replicas", "never"]
    commands.run("train", *words, "--steps", "3", "--run-dir", "run")
    commands.run("train", *words, "--steps", "6", "--run-dir", "run", "--resume")
    commands.run("export", "run", "-o", "out.safetensors")
    weights = load_file(tmp_path / "out.safetensors")
    assert [name for name in weights if name.startswith("loss.")] == ["loss.scale", "loss.weight"]
    printed = commands.plain_loop("out.safetensors", steps=6)
    assert printed.endswith("6 of 6 tensors are equal, bit for bit\n")
    # weights of the unchanged model are enough to start from; the loss then keeps its initial values
    body = {name: tensor for name, tensor in weights.items() if not name.startswith("loss.")}
    save_file(body, tmp_path / "body.safetensors")
    commands.run("train", *words, "--steps", "1", "--run-dir", "again", "--init-from", "body.safetensors")
    commands.run("export", "again", "-o", "again.safetensors")
    torch.manual_seed(0)
    torch.nn.ModuleList([torch.nn.Linear(8, 16), torch.nn.Linear(16, 12)])
    began = torch.randn(5, 12)
    moved = (load_file(tmp_path / "again.safetensors")["loss.weight"] - began).abs().max()
    assert 0 < moved < 0.06, "one AdamW step from the initial weights"
    assert commands.document("eval", "run")["step"] == 6
