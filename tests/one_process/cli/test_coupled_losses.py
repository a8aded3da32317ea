"""Losses that microbatches change: one microbatch unless asked, and then every command says by how much they differ."""

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
        self.enter = nn.Linear(16, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), %s) for _ in range(3))
        self.head = nn.Linear(24, 6)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x), 0.05 * self.head.weight.pow(2).sum()


def build_model():
    return Net()


def data(batch_size=12):
    g = torch.Generator().manual_seed(1)
    for i in range(6):
        yield torch.randn(batch_size, 16, generator=g), torch.randint(6, (batch_size,), generator=g)


def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.001)


def loss(output, target):
    logits, penalty = output
    %s
"""
CHOSEN = "logits.gather(1, target[:, None])[:, 0]"
# the activation, the loss, and the cause ("": microbatches are a batch)
KINDS = {
    "a sum and a term for the batch": (
        "nn.Tanh()", 'return F.cross_entropy(logits, target, reduction="sum") + penalty', "does not depend on the batch"
    ),
    "contrast in the batch": (
        "nn.Tanh()",
        "z = F.normalize(logits, dim=-1)\n    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))",
        "couples the samples",
    ),
    "normalized advantages": (
        "nn.Tanh()",
        "a = target.float()\n    a = (a - a.mean()) / (a.std() + 1e-8)\n"
        f"    return -({CHOSEN}.log_softmax(0).exp() * a).mean()",
        "couples the samples",
    ),
    "means over other things": (
        "nn.Tanh()",
        "mask = (target < 4).float()\n    each = F.cross_entropy(logits, target, reduction='none')\n"
        "    return (each * mask).sum() / mask.sum() + logits.pow(2).mean()",
        "different numbers",
    ),
    "a mean and a penalty": ("nn.Tanh()", "return F.cross_entropy(logits, target) + penalty", ""),
    "BatchNorm": ("nn.BatchNorm1d(24)", "return F.cross_entropy(logits, target) + penalty", ""),
}  # fmt: skip


def planned(run: Any, *arguments: str) -> dict[str, Any]:
    done = run("plan", *arguments, "--gpus", "2", "--device", "cpu", "--json")
    assert done.exit_code == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def coupling_in(document: dict[str, Any]) -> list[str]:
    return [warning for warning in document["warnings"] if "microbatches of them differ by" in warning]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_microbatches_change_has_one_unless_asked(kind: str, run: Any, tmp_path: Path) -> None:
    activation, loss, cause = KINDS[kind]
    (tmp_path / "net.py").write_text(MODEL % (activation, loss))
    document = planned(run, "net.py", "--replicas", "never")
    if not cause:
        assert document["num_microbatches"] > 1 and not coupling_in(document)
        return
    assert document["num_microbatches"] == 1
    (line,) = coupling_in(document)
    assert cause in line and " %; so each minibatch is one microbatch" in line
    document = planned(run, "--num-microbatches", "3")  # from the stored profile
    assert document["num_microbatches"] == 3
    (line,) = coupling_in(document)
    assert " %; training with 3 microbatches is not training with whole minibatches" in line


def test_every_command_repeats_the_difference_and_says_what_is_equal(run: Any, tmp_path: Path) -> None:
    activation, loss, _ = KINDS["contrast in the batch"]
    (tmp_path / "net.py").write_text(MODEL % (activation, loss))
    done = run("check", "net.py", "--gpus", "2", "--replicas", "never", "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    assert "equal to plain training, to the last bit" in done.stdout and "over whole batches of 12" in done.stdout
    assert "so each minibatch is one microbatch" in done.stderr
    done = run("check", "--num-microbatches", "3")
    assert done.exit_code == 0, done.stderr
    assert "equal to plain training, to the last bit, over the same 3 microbatches" in done.stdout
    assert "the full batch differs by " in done.stdout and done.stdout.partition("differs by ")[2].split()[1] == "%"
    assert "training with 3 microbatches is not" in done.stderr
    done = run("train", "--steps", "2")  # the number of microbatches that was asked for
    assert done.exit_code == 0, done.stderr
    assert "training with 3 microbatches is not" in done.stderr
    assert "compared with plain training: equal, bit for bit, over the same 3 microbatches" in done.stderr
