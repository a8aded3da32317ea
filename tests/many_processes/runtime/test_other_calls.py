"""A model whose Python makes other calls at some steps trains as in a plain loop, from stage code of each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import Commands, assert_no_process_is_left, losses, training, wait_for_steps

# layers are left out by a generator of the model's own, one is frozen, a dropout rises, after_step and the scheduler
# set what the loss reads, and the last batch of an epoch is smaller
MODEL = """
import random
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return x + self.drop(self.b(F.gelu(self.a(self.norm(x)))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.head = nn.Linear(8, 16), nn.Linear(16, 5)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(4)), nn.LayerNorm(16)
        self.calls, self.coin = 0, random.Random(3)

    def forward(self, x):
        self.calls += 1
        x = self.start(x)
        if self.calls == 17:
            self.blocks[3].requires_grad_(False)
        for index, block in enumerate(self.blocks):
            block.drop.p = min(0.3, 0.01 * (self.calls // 4))
            if index not in (1, 2) or self.coin.random() < 0.7:
                x = block(x)
        return self.head(self.norm(x))

def build_model():
    return Net()

STEP, EPOCH = [0], [0]

def loss(output, target):
    return F.cross_entropy(output, target, label_smoothing=0.1 if STEP[0] >= 5 else 0.0) * (1 - 0.01 * EPOCH[0])

def data(batch_size=12):
    g = torch.Generator().manual_seed(5)
    for index in range(7):
        count = batch_size if index < 6 else 6
        yield torch.randn(count, 8, generator=g), torch.randint(0, 5, (count,), generator=g)

@torch.no_grad()
def after_step(named_parameters, step):
    STEP[0] = step
    for name, parameter in named_parameters:
        if "head" in name:
            parameter.clamp_(-0.4, 0.4)

def optimizer(named_parameters):
    return torch.optim.AdamW([parameter for _, parameter in named_parameters], lr=0.01)

def factor(epoch):
    EPOCH[0] = epoch
    return min(1.0, (epoch + 1) / 5)

def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
"""
OTHER_SUM = (
    MODEL
    + """

def loss(output, target):
    return F.cross_entropy(output, target, reduction="mean" if STEP[0] < 5 else "sum")
"""
)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    (tmp_path / "model.py").write_text(MODEL)
    with Commands(tmp_path) as commands:
        yield commands


def test_other_calls_are_equal_to_plain_training(commands: Commands) -> None:
    _, err = commands.run(*training(steps=9), "--replicas", "never")
    assert "3 steps compared with plain training: equal, bit for bit" in err
    assert "generated stage code for what the model does for minibatch" in err
    assert "def forward" in (commands.folder / "run" / "stages" / "variant_1" / "stage_0.py").read_text()
    out, _ = commands.run("check", "model.py", "--steps", "16")
    assert "equal to plain training, to the last bit" in out
    out, _ = commands.run("check", "model.py", "--steps", "6", "--schedule", "gpipe", "--recompute", "always")
    assert "equal to plain training, to the last bit" in out


def test_a_layer_of_a_later_step_is_on_the_stage_that_needs_it(commands: Commands) -> None:
    late = MODEL.replace(
        "        for index, block", "        x = self.late(x) if self.calls > 14 else x\n        for index, block"
    )
    late = late.replace(
        "    def forward(self, x):\n        self.calls",
        "        self.late = Block()\n\n    def forward(self, x):\n        self.calls",
    )
    (commands.folder / "model.py").write_text(late)
    commands.run(*training(steps=6), "--replicas", "never")
    out, _ = commands.run("check", "model.py", "--steps", "6")
    assert "equal to plain training, to the last bit" in out


def test_a_run_that_is_killed_and_resumed_makes_the_calls_of_one_that_was_not(commands: Commands) -> None:
    words = ("--no-check", "--replicas", "never", "--checkpoint-every", "2", "--max-restarts", "1")
    commands.run(*training(steps=18), *words, "--run-dir", "whole")
    process = commands.start(*training(steps=12), *words)
    wait_for_steps(commands.folder / "run", process, count=5)[0].kill()
    assert process.wait(120) == 0
    commands.run(*training(steps=18), *words, "--resume")
    whole, resumed = (losses(commands.folder / run) for run in ("whole", "run"))
    assert whole == resumed and len(whole) == 18
    assert_no_process_is_left(commands.folder)


def test_a_loss_that_divides_by_another_number_ends_the_run(commands: Commands) -> None:
    (commands.folder / "model.py").write_text(OTHER_SUM)
    _, err = commands.run(*training(steps=12), "--replicas", "never", code=3)
    text = " ".join(err.split())
    assert "what the model does for minibatch 7 cannot run in these stages: its loss divides by" in text
    assert len(losses(commands.folder / "run")) == 6
