"""Through the command line: a momentum teacher in another stage than its student equals the plain loop's."""

from __future__ import annotations

from pathlib import Path

from support.commands import Commands

MODEL = """
import copy
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # wide and deep, so that the layers decide where stages end
        hidden = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())]
        self.student = nn.Sequential(nn.Linear(8, 256), *hidden, nn.Dropout(0.1), nn.Linear(256, 8))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
    def forward(self, x):
        with torch.no_grad():
            theirs = self.teacher(x.flip(1))
        return (F.normalize(self.student(x), dim=1) - F.normalize(theirs, dim=1)).square().sum(1).mean()

def build_model():
    return Net()

def loss(output, target):
    return output

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for _ in range(12):
        yield torch.randn(batch_size, 8, generator=g), torch.zeros(batch_size)
"""
HOOK = """
import torch

@torch.no_grad()
def momentum(named_parameters, step):
    named = dict(named_parameters)
    for name, parameter in named.items():
        if name.startswith("teacher."):
            parameter.lerp_(named["student." + name.removeprefix("teacher.")], 0.5 / (step + 2))

def average(named_parameters, step):
    norm = sum(float(parameter.detach().square().sum()) for _, parameter in named_parameters) ** 0.5
    for _, parameter in named_parameters:
        parameter.data.div_(norm)
"""
FILES = {"model.py": MODEL, "hook.py": HOOK}


def test_a_momentum_teacher_works_with_every_command(commands: Commands, tmp_path: Path) -> None:
    words = ["model.py", "--gpus", "3", "--device", "cpu", "--batch-size", "8", "--num-microbatches", "4"]
    words += ["--lr", "0.05", "--replicas", "never", "--schedule", "2bw"]
    hook = ["--after-step", "hook.py:momentum"]
    assert commands.document("check", *words, *hook, "--steps", "3")["bitwise"]
    commands.run("train", *words, *hook, "--steps", "3", "--run-dir", "run", "--audit-every", "2")
    commands.run("train", *words, *hook, "--steps", "6", "--run-dir", "run", "--resume")
    commands.run("export", "run", "-o", "out.safetensors")
    printed = commands.plain_loop("out.safetensors", steps=6)
    assert printed.endswith("24 of 24 tensors are equal, bit for bit\n")
    words += ["--gpu-memory", "6.5MiB"]  # excludes a plan with all parameters in one stage, where the hook is right
    for flag in ("--check", "--no-check"):
        _, err = commands.run("train", *words, "--after-step", "hook.py:average", "--steps", "2", flag, code=1)
        assert "after_step depends on parameters of other stages" in err and "hook.py" in err and "--gpus 1" in err
