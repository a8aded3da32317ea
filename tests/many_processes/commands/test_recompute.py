"""Recompute through the commands: by block, and a model that calls ``checkpoint()`` itself."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autopipe.cli.main import autopipe

MODEL = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant, self.blocks, self.head = reentrant, nn.ModuleList(Block() for _ in range(4)), nn.Linear(16, 3)

    def forward(self, x):
        for block in self.blocks:
            if self.reentrant in (0, 1):
                x = checkpoint(block, x, use_reentrant=bool(self.reentrant))
            else:
                x = block(x)
        return self.head(x)


def build_model(reentrant=0):
    return Net(reentrant)


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


def data(batch_size=8):
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, torch.randint(0, 3, (batch_size,), generator=generator)
"""


def document(*args: str) -> dict[str, Any]:
    done = CliRunner().invoke(autopipe, [*args, "--json"])
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize(
    ("reentrant", "options", "modes"),
    [
        (2, ("--recompute", "block"), ["block", "block"]),
        (0, (), ["block", "block"]),
        (1, ("--recompute", "never"), ["never", "never"]),
    ],
)
def test_training_equals_plain_training(
    reentrant: int, options: tuple[str, ...], modes: list[str], tmp_path: Path
) -> None:
    target, work = tmp_path / "net.py", tmp_path / "work"
    target.write_text(MODEL.replace("reentrant=0", f"reentrant={reentrant}"))
    shared = (str(target), "--work-dir", str(work), "--batch-size", "8", *options)
    plan = document("plan", *shared, "--gpus", "2", "--replicas", "never", "--schedule", "gpipe")
    assert plan["recompute"] == modes
    report = document("check", "--work-dir", str(work))
    assert report["equal"] and report["bitwise"]
    text = "".join((work / "stages" / f"stage_{k}.py").read_text() for k in (0, 1))
    assert ("recomputed(unit_0" in text) == ("block" in modes)
