"""Through the command line: a number and a key of the batch change, and training equals a plain loop."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from support.commands import Commands
from support.oracle import load

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.o = nn.Linear(16, 7)

    def forward(self, x, y, alpha, extra=None):
        x = x if extra is None else x + extra
        for block in self.h:
            x = x + torch.relu(block(x))
        return dict(loss=F.cross_entropy(self.o(x), y) * alpha)


def build_model():
    model = Net()
    model.h[0].eval()
    return model


def optimizer(named_parameters):
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)


def data(batch_size=6):
    g = torch.Generator().manual_seed(5)
    for i in range(4):
        x, y = torch.randn(batch_size, 16, generator=g), torch.randint(0, 7, (batch_size,), generator=g)
        yield dict(x=x, y=y, alpha=0.5 if i < 3 else 1.5, **(dict(extra=x * 2) if i == 1 else {}))
"""
FILES = {"model.py": MODEL}


def test_batches_with_a_changed_number_and_key_train_as_in_a_plain_loop(commands: Commands, tmp_path: Path) -> None:
    words = ["--gpus", "2", "--device", "cpu", "--batch-size", "6", "--num-microbatches", "3", "--schedule", "1f1b"]
    out, err = commands.run(
        "train", "model.py", *words, "--microbatch-sizes", "2", "--steps", "4", "--run-dir", "run", "--no-check"
    )
    assert "['extra'] is new" in out + err
    assert "['alpha'] is 1.5, where 0.5 was captured" in out + err
    assert "1 module of 7 in evaluation mode, as the model file sets them: h.0" in out + err
    commands.run("export", "run", "-o", "model.safetensors")
    module = load(tmp_path / "model.py")
    torch.manual_seed(0)
    model = module.build_model()
    optimizer = module.optimizer(list(model.named_parameters()))
    for item in module.data():
        for j in range(3):
            part = {key: value.tensor_split(3)[j] if key != "alpha" else value for key, value in item.items()}
            (model(**part)["loss"] * (2 / 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[key], value) for key, value in model.state_dict().items())
