"""A loss without a gradient is refused by every command, before anything is trained, as ``backward()`` refuses it."""

from __future__ import annotations

import runpy
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
        self.enter, self.middle, self.out = nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def features(self, x):
        return self.middle(self.enter(x).relu())

    def forward(self, x):
        %s


def build_model():
    model = Net()
    %s
    return model


def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.randn(batch_size, 10, generator=g)
        yield x, (x.sum(1) > 0).long()


def loss(output, target):
    %s
"""
FORWARD, BUILD, LOSS = "return self.out(self.features(x))", "pass", "return F.cross_entropy(output, target)"
UNDER = "with torch.%s():\n            h = self.out(self.features(x))\n        return h"
PARTLY = "with torch.no_grad():\n            h = self.enter(x)\n        return self.out(h)"
OUTSIDE = "leave these to the evaluation"
FROZEN = "model.requires_grad_(False)"
# the three bodies, and the cause, the text of its line ("": the definition of the model), and the remedy
REFUSED = {
    "a detached output": (FORWARD + ".detach()", BUILD, LOSS, "detach", FORWARD, "remove detach()"),
    "the data of an output": (FORWARD + ".data", BUILD, LOSS, ".data", FORWARD, "remove .data"),
    "no_grad": (UNDER % "no_grad", BUILD, LOSS, "out runs under torch.no_grad()", "h = self.out", OUTSIDE),
    "inference_mode": (UNDER % "inference_mode", BUILD, LOSS, "torch.inference_mode()", "h = self.out", OUTSIDE),
    "a detached loss": (FORWARD, BUILD, LOSS + ".detach()", "detach", LOSS, "remove detach()"),
    "accuracy": (FORWARD, BUILD, "return (output.argmax(-1) == target).float().mean()", "argmax", ".argmax", "compute"),
    "all frozen": (FORWARD, FROZEN, LOSS, "no parameter of the model requires a gradient", "", "set requires_grad"),
    "no parameters": ("pass", "return nn.Softmax(-1)", LOSS, "no parameter of the model", "", "register what is to be"),
    "of the batch alone": ("return x[:, :3]", BUILD, LOSS, "does not depend on any parameter", "", "compute the loss"),
}  # fmt: skip
TRAINED = {
    "a frozen part": (FORWARD, "model.enter.requires_grad_(False)", LOSS),
    "a part without a gradient": ("return self.out(self.features(x).detach())", BUILD, LOSS),
    "a part under no_grad": (PARTLY, BUILD, LOSS),
    "a parameter that nothing reads": ("return self.out(self.enter(x))", BUILD, LOSS),
}  # fmt: skip


def written(folder: Path, bodies: tuple[str, ...]) -> None:
    (folder / "net.py").write_text(MODEL % bodies[:3])


def plainly(folder: Path) -> None:
    """Run one backward pass without autopipe."""
    net = runpy.run_path(str(folder / "net.py"))
    x, y = next(net["data"]())
    net["loss"](net["build_model"]()(x), y).backward()


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_without_a_gradient_is_refused_with_its_cause(name: str, run: Any, tmp_path: Path) -> None:
    *bodies, cause, line, remedy = REFUSED[name]
    written(tmp_path, tuple(bodies))
    with pytest.raises(RuntimeError, match="does not require grad"):
        plainly(tmp_path)
    done = run("profile", "net.py", "--device", "cpu")
    assert done.exit_code == 1
    assert "the loss has no gradient" in done.stderr and cause in done.stderr and f"try: {remedy}" in done.stderr
    place = done.stderr.partition("at:  net.py:")[2].partition("\n")[0]
    text = (tmp_path / "net.py").read_text().splitlines()
    assert line in text[int(place) - 1] if line else place == "build_model"
    assert not (tmp_path / ".autopipe" / "profile.json").exists()


@pytest.mark.parametrize("command", ["check", "train", "plan"])
def test_no_command_trains_or_proves_such_a_loss(command: str, run: Any, tmp_path: Path) -> None:
    written(tmp_path, REFUSED["a detached output"])
    steps = ["--steps", "2"] if command != "plan" else []
    done = run(command, "net.py", "--gpus", "2", "--replicas", "never", "--device", "cpu", *steps)
    assert done.exit_code == 1
    assert "the loss has no gradient" in done.stderr and "equal" not in done.stdout
    assert not list(tmp_path.glob(".autopipe/runs/*"))


@pytest.mark.parametrize("name", TRAINED)
def test_a_part_without_a_gradient_is_not_refused(name: str, run: Any, tmp_path: Path) -> None:
    written(tmp_path, TRAINED[name])
    plainly(tmp_path)
    done = run("profile", "net.py", "--estimate")
    assert done.exit_code == 0, done.stderr
