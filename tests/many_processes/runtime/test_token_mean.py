"""Through the command line: a mean over tokens is the mean over the complete batch, and ``check`` confirms it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.commands import Commands

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

def build_model():
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))

def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    while True:
        lengths = torch.randint(1, 13, (batch_size,), generator=g)
        lengths[:2] = 0  # a microbatch without a target
        ids = torch.randint(0, 16, (batch_size, 12), generator=g)
        yield ids, ids.masked_fill(torch.arange(12)[None] >= lengths[:, None], -100)

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.5)

def evaluate_data(batch_size=8):
    yield from (item for item, _ in zip(data(batch_size), range(3)))
"""
FILES = {"model.py": MODEL}


def test_a_token_mean_is_that_of_the_complete_batch(commands: Commands, tmp_path: Path, monkeypatch) -> None:
    words = ["model.py", "--gpus", "2", "--device", "cpu", "--batch-size", "8", "--num-microbatches", "4"]
    report = commands.document("check", *words, "--full-batch")
    assert report["bitwise"]
    assert report["full_batch"]["microbatches"] == 4
    assert report["full_batch"]["samples"] == [2, 2, 2, 2]
    assert report["full_batch"]["error"] < 1e-5
    assert all(entry["weight_error"] < 1e-5 for entry in report["full_batch"]["parameters"])
    commands.run("train", *words, "--steps", "6", "--run-dir", "run")
    commands.run("export", "run", "-o", "out.safetensors")
    evaluated = commands.document("eval", "run")
    printed = commands.plain_loop("out.safetensors", steps=6)
    assert printed.endswith("5 of 5 tensors are equal, bit for bit\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    import model as users

    torch.manual_seed(0)
    net = users.build_model().train()
    optimizer = users.optimizer(list(net.named_parameters()))
    for (ids, target), _ in zip(users.data(8), range(6), strict=False):
        users.loss(net(ids), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = load_file(tmp_path / "out.safetensors")
    assert max(float((weights[name] - p.detach()).abs().max()) for name, p in net.named_parameters()) < 1e-5
    everything = list(users.evaluate_data(8))
    ids, target = (torch.cat([item[i] for item in everything]) for i in (0, 1))
    with torch.no_grad():
        assert evaluated["loss"] == pytest.approx(float(users.loss(net(ids), target)), rel=1e-5)
