"""A process beside rank 0 compares the Python of the model with the stage code for every microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.commands import Commands, assert_no_process_is_left, losses
from support.oracle import train as plain
from support.pipelines import minibatches

from autopipe.workload import LoadOptions, load_workload

MODEL = """
import os
import pathlib
import torch
from torch import nn
from torch.nn import functional as F

FACTOR = pathlib.Path(__file__).with_name("factor")

def write(text):  # at once, because several processes may
    new = FACTOR.with_name(f"{{os.getpid()}}.new")
    new.write_text(text)
    new.replace(FACTOR)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = torch.relu(self.a(x))
        x = x * {factor}
        return self.c(torch.relu(self.b(x)))

def build_model():
    return Net()

def loss(output, target):
    return F.cross_entropy(output, target)

def data(batch_size=8):
    g = torch.Generator().manual_seed(5)
    for step in range(40):
        {change}
        yield torch.randn(batch_size, 8, generator=g), torch.randint(0, 5, (batch_size,), generator=g)

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)
"""
WORDS = ("train", "model.py", "--device", "cpu", "--gpus", "2", "--batch-size", "8", "--microbatch-sizes", "2",
         "--num-microbatches", "4", "--replicas", "never", "--data-reader", "beside")  # fmt: skip


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path)
    yield commands
    commands.end()


def write(folder: Path, factor: str, change: str = "pass") -> None:
    (folder / "factor").write_text("0.5")
    (folder / "model.py").write_text(MODEL.format(factor=factor, change=change))


READS = "float(FACTOR.read_text())"
CHANGES = 'write("0.25" if step >= 9 else "0.5")'


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_file_that_changes_stops_the_run_at_its_microbatch(schedule: str, commands: Commands) -> None:
    write(commands.folder, READS, CHANGES)
    words = (*WORDS, "--steps", "20", "--run-dir", "run", "--schedule", schedule)
    outcome = commands.outcome(*words)
    assert outcome.returncode == 3
    error = outcome.stderr[outcome.stderr.index("Error:") :]
    assert "minibatch 10, microbatch 1: the forward or the loss does not do what was recorded" in error
    assert "recorded was operator.mul" in error
    assert "0.5) at model.py:24" in error
    assert "0.25) at model.py:24" in error
    assert "at:  rank 0; model.py:24" in error
    assert "try:" in error
    assert "Traceback" not in outcome.stderr
    if schedule == "1f1b":
        assert len(losses(commands.folder / "run")) == 9
    assert_no_process_is_left(commands.folder)


def test_a_run_whose_python_does_not_change_is_that_of_the_plain_loop(commands: Commands) -> None:
    write(commands.folder, READS)
    commands.run(*WORDS, "--steps", "6", "--run-dir", "run", "--schedule", "1f1b")
    path = commands.folder / "model.py"
    torch.set_num_threads(1)
    expected, _, _ = plain(path, minibatches(load_workload(LoadOptions(str(path))), 6, 8), 4)
    assert [*losses(commands.folder / "run").values()] == [float(value) for value in expected]


def test_a_number_that_changes_travels_with_its_microbatch(commands: Commands) -> None:
    write(commands.folder, "(1.0 + 0.01 * self.calls)")
    words = (*WORDS[:-2], "--steps", "6", "--run-dir", "run", "--schedule", "1f1b")
    _, stderr = commands.run(*words)
    assert "1.01 in mul at model.py:24" in " ".join(stderr.split())
    path = commands.folder / "model.py"
    torch.set_num_threads(1)
    expected, _, _ = plain(path, minibatches(load_workload(LoadOptions(str(path))), 6, 8), 4)
    assert [*losses(commands.folder / "run").values()] == [float(value) for value in expected]
    for refused in (("--audit-every", "2"), ("--data-reader", "each")):
        _, stderr = commands.run(*words, *refused, code=1)
        assert "the model's Python changes what forward and loss do from step to step" in stderr
    assert_no_process_is_left(commands.folder)
