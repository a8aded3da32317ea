"""A model whose Python changes numbers from step to step is compared with plain training, which runs its Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import Commands, losses, training

# the forward, the loss and the data change numbers: in the model, in the module and in an imported file
MODEL = """
import counts
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.k = 0

    def forward(self, x):
        self.k += 1
        x = F.dropout(torch.relu(self.a(x)) * 0.99 ** self.k, 0.1 + 0.0001 * self.k)
        return self.c(torch.relu(self.b(x)) * counts.FACTOR)

def build_model():
    return Net()

def loss(output, target):
    counts.LOSSES += 1
    return F.cross_entropy(output, target) * min(1.0, counts.LOSSES / 300)

def optimizer(named_parameters):
    return torch.optim.Adam([p for _, p in named_parameters], lr=0.01)

def data(batch_size=8):
    g = torch.Generator().manual_seed(5)
    for _ in range(2):
        counts.FACTOR *= 0.999
        yield torch.randn(batch_size, 8, generator=g), torch.randint(0, 5, (batch_size,), generator=g)
"""
# the process that reads for the stages sends a number that is not that of the microbatch
WRONG = """

import multiprocessing
if multiprocessing.current_process().name == "read_beside":
    from dataclasses import replace
    from autopipe.trace.tape.guard import Guard
    follow = Guard.follow

    def wrong(self, part, step, index, *args):
        follows = follow(self, part, step, index, *args)
        factor = 1.0001 if (step, index) == (1, 2) else 1.0
        return replace(follows, numbers={name: number * factor for name, number in follows.numbers.items()})

    Guard.follow = wrong
"""
EQUAL = "3 steps compared with plain training: equal, bit for bit"


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "counts.py").write_text("FACTOR, LOSSES = 1.0, 0\n")
    with Commands(tmp_path) as commands:
        yield commands


def test_plain_training_gives_the_numbers_that_the_stages_get(commands: Commands) -> None:
    _, err = commands.run(*training(steps=5), "--replicas", "never")
    assert "these numbers travel with it" in " ".join(err.split()) and EQUAL in err
    assert "no smaller minibatch and no full batch compared" in err
    out, _ = commands.run("check", "model.py", "--gpus", "2", "--device", "cpu")
    assert "equal to plain training, to the last bit" in out
    _, err = commands.run("check", "model.py", "--gpus", "2", "--device", "cpu", "--full-batch", code=1)
    assert "a full batch (--full-batch) would do something else than its microbatches" in " ".join(err.split())


def test_a_number_of_another_microbatch_is_a_difference(commands: Commands) -> None:
    with (commands.folder / "model.py").open("a") as file:
        file.write(WRONG)
    _, err = commands.run(*training(steps=5), code=1)
    assert "training in stages differs from plain training: the first step is equal bit for bit" in err
    document = commands.document("check", "model.py", "--gpus", "2", "--device", "cpu", code=1)
    assert not document["equal"] and "the first step is equal bit for bit" in document["cause"]


def test_a_batch_of_another_shape_is_recorded_as_it_runs(commands: Commands) -> None:
    wide = MODEL.replace("self.a(x)", "self.a(x[:, -8:])").replace("batch_size, 8, gen", "batch_size, width(), gen")
    wide += """
def width():
    counts.BATCHES += 1
    return 8 if counts.BATCHES % 9 else 12
"""
    (commands.folder / "model.py").write_text(wide)
    (commands.folder / "counts.py").write_text("FACTOR, LOSSES, BATCHES = 1.0, 0, 0\n")
    commands.run(*training(steps=12), "--no-check", "--replicas", "never")
    assert (commands.folder / "run" / "stages" / "variant_1" / "stage_1.py").is_file()
    out, _ = commands.run("check", "model.py", "--steps", "12")
    assert "equal to plain training, to the last bit" in out


def test_a_run_resumes_with_the_same_number_of_microbatches_only(commands: Commands) -> None:
    words = [*training(steps=14), "--no-check", "--replicas", "never"]
    commands.run(*words, "--run-dir", "whole")
    commands.run(*training(steps=8), "--no-check", "--replicas", "never")
    words[words.index("--num-microbatches") + 1] = "2"
    _, err = commands.run(*words, "--resume", code=1)
    assert "would change how often its Python has run" in " ".join(err.split())
    words[words.index("--num-microbatches") + 1] = "4"
    commands.run(*words, "--resume")
    whole, resumed = (losses(commands.folder / run) for run in ("whole", "run"))
    assert whole == resumed and len(whole) == 14


def test_the_data_may_come_from_the_workers_of_a_data_loader(commands: Commands) -> None:
    loader = """
def data(batch_size=8):
    g = torch.Generator().manual_seed(5)
    rows = torch.utils.data.TensorDataset(torch.randn(48, 8, generator=g), torch.arange(48) % 5)
    return torch.utils.data.DataLoader(rows, batch_size=batch_size, num_workers=1)
"""
    (commands.folder / "model.py").write_text(MODEL[: MODEL.index("def data")] + loader)
    _, err = commands.run(*training(steps=5), "--replicas", "never")
    assert "these numbers travel with it" in " ".join(err.split()) and EQUAL in err
