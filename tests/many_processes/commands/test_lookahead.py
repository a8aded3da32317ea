"""Batches of another form among the first minibatches are planned for, or refused before a rank starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from support.commands import Commands, fix_costs
from support.oracle import load

from autopipe.cli.main import autopipe

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.o = nn.Linear(16, 7)
        self.extra = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.BatchNorm1d(16))

    def forward(self, x, y, extra=None, alpha=1.0):
        x = x if extra is None else x + self.extra(extra)
        for block in self.h:
            x = x + torch.relu(block(x))
        %(end)s
        return dict(loss=F.cross_entropy(self.o(x), y) * alpha)


def build_model():
    return Net()


def optimizer(named_parameters):
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)


def data(batch_size=6):
    g = torch.Generator().manual_seed(5)
    for i in range(8):
        x, y = torch.randn(batch_size, 16, generator=g), torch.randint(0, 7, (batch_size,), generator=g)
        batch = dict(x=x, y=y)
        %(change)s
        yield batch
"""
WORDS = (
    "--gpus", "2", "--device", "cpu", "--batch-size", "6", "--num-microbatches", "3", "--schedule", "1f1b",
    "--replicas", "never", "--microbatch-sizes", "2",
)  # fmt: skip
LATER = "if i % 3 == 2: batch['extra'] = x * 2"


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    def write(change: str = LATER, end: str = "pass") -> Path:
        path = tmp_path / "model.py"
        path.write_text(MODEL % {"change": change, "end": end})
        return path

    return write


def run(*words: str) -> Result:
    return CliRunner().invoke(autopipe, words)


def profile_evenly() -> None:
    """Profile the model with equal costs, so that the cut is in the middle of the layers."""
    done = run("profile", "model.py", "--device", "cpu", "--microbatch-sizes", "2")
    assert done.exit_code == 0, done.output
    fix_costs(Path(".autopipe"))


def plain(path: Path, steps: int) -> dict[str, torch.Tensor]:
    """Train in a plain loop of three microbatches; return the weights and buffers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the ranks
    module = load(path)
    torch.manual_seed(0)
    model = module.build_model()
    optimizer = module.optimizer(list(model.named_parameters()))
    for item, _ in zip(module.data(), range(steps), strict=False):
        for j in range(3):
            part = {key: value.tensor_split(3)[j] for key, value in item.items()}
            (model(**part)["loss"] * (2 / 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    return dict(model.state_dict())


def test_layers_of_later_batches_are_assigned_to_the_stage_that_needs_them(
    written: Callable[..., Path], commands: Commands, tmp_path: Path
) -> None:
    path = written()
    out, err = commands.run("train", "model.py", *WORDS, "--steps", "6", "--run-dir", "run")
    assert "3 steps compared with plain training: equal, bit for bit" in out + err
    assert "for a batch of another form: ['extra'] is new" in " ".join((out + err).split())
    commands.run("export", "run", "-o", "model.safetensors")
    trained = load_file(tmp_path / "model.safetensors")
    for name, value in plain(path, 6).items():
        assert torch.equal(trained[name], value), name


def test_layers_that_two_stages_need_are_refused_before_training(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written(end="x = x if extra is None else x + self.extra(extra)")
    monkeypatch.chdir(tmp_path)
    profile_evenly()
    for command in ("train", "check"):
        done = run(command, "model.py", *WORDS)
        text = " ".join(done.stderr.split())
        assert done.exit_code == 1, done.output
        assert (
            "a batch of another form: ['extra'] is new (tensor float32, 2 dimensions) does not fit these stages" in text
        )
        assert "minibatch 2 of data, before training" in text
        assert "let the first batch use the complete model" in text
        assert "training on 2 ranks" not in done.output
    # training succeeds if it ends before that batch, or if the first batch uses the complete model
    assert run("train", "model.py", *WORDS, "--steps", "2").exit_code == 0
    # (a plan that cuts through layers that a later batch skips has no remedy)
    written(change="if i != 2: batch['extra'] = x * 2")
    profile_evenly()
    done = run("train", "model.py", *WORDS, "--steps", "4")
    assert done.exit_code == 0, done.output


def test_more_values_than_max_shapes_are_refused_before_training(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written(change="batch['alpha'] = 1.0 + i")
    monkeypatch.chdir(tmp_path)
    done = run("train", "model.py", *WORDS, "--max-shapes", "3")
    text = " ".join(done.stderr.split())
    assert done.exit_code == 1, done.output
    assert "['alpha'] is 8.0, where 1.0 was captured" in text
    assert "give ['alpha'] as a tensor, torch.tensor(value)" in text
    assert "minibatch 7 of data, before training" in text
