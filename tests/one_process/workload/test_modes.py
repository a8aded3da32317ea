"""Modes stay as the model file sets them: modules in evaluation mode train as in a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.oracle import train as plain
from support.pipelines import build, captured_file, minibatches, plan_for

from autopipe.workload.model.factory import for_training, trains

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)

    def forward(self, x):
        x = self.drop(self.norm(self.linear(x)))
        return x + F.dropout(x, 0.5, self.training)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.neck, self.head = nn.Sequential(Block(), Block()), Block(), nn.Linear(6, 3)

    def forward(self, x):
        x = self.neck(self.backbone(x))
        return self.head(x * 2 if self.training else x)


def build_model():
    model = Net()
    %(modes)s
    return model


def loss(output, target):
    return F.cross_entropy(output, target)


def data(batch_size=6):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield torch.randn(batch_size, 6, generator=g), torch.randint(0, 3, (batch_size,), generator=g)


evaluate_data = data


def optimizer(named_parameters):
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)
"""
MODES = {
    "frozen_backbone": "model.backbone.requires_grad_(False).eval()",
    "one_norm": "model.backbone[1].norm.eval()",
    "only_the_root": "model.training = False",
    "only_one_part_trains": "model.eval(); model.neck.train()",
    "all_in_evaluation": "model.eval()",
    "own_train": "model.train = lambda mode=True: (nn.Module.train(model, mode), model.backbone.eval())[0]",
}


@pytest.mark.parametrize("name", sorted(MODES))
def test_every_module_trains_in_its_mode(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL % {"modes": MODES[name]})
    subject = captured_file(path)
    pipeline = build(subject, plan_for(subject, 3, "1f1b", 3, 6), tmp_path / "run", evaluate_every=1)
    items = minibatches(subject.workload, 3, 6)
    sessions = pipeline.train(items)
    losses, model, _ = plain(path, items, 3)
    ours = pipeline.weights(sessions)
    assert [sessions[0].executor.stepper.losses[step] for step in range(3)] == losses
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(ours[key], value), key
    for session in sessions:
        for runner in session.executor.runners.values():
            modes = {path: module.training for path, module in model.named_modules()}
            for place, module in runner.stage.named_modules():
                if type(module).__name__ != "Container" and place:
                    assert module.training == modes[place], place


def test_a_note_describes_the_modes() -> None:
    parts = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Dropout(), torch.nn.ReLU()))
    assert for_training(parts)[1] == ""
    parts[1].eval()
    model, note = for_training(parts)
    assert [module.training for module in model.modules()] == [True, True, False, False, False]
    assert note.startswith("3 modules of 5 in evaluation mode, as the model file sets them: 1 (")
    parts.eval()
    assert not trains(parts)
    model, note = for_training(parts)
    assert all(module.training for module in model.modules())
    assert "was in evaluation mode" in note
