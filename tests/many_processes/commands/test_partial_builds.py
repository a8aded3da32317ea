"""Ranks that build only their own parameters start from the weights of a plain build, or say why they cannot."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from autopipe.cli.main import autopipe
from autopipe.workload import LoadOptions, load_workload
from autopipe.workload.model import partial, size_limits

# the file sets the limit in every process that imports it
MODEL = """
import itertools
import torch
from torch import nn
from torch.nn.init import orthogonal_  # by this name, it does nothing to a tensor on meta
from autopipe.workload.model import partial

partial.WORTH_BYTES = 1
{large}
COUNT = itertools.count(1)

def build_model():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)), nn.Linear(16, 3))
    own = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for block in model[:6]:
            block[0].bias.normal_(generator=own)
            {more}
    return model

def data():
    return [(torch.ones(4, 16), torch.tensor([0, 1, 2, 0]))]

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.0)
"""
NOTE = "ranks build the complete model"


@pytest.fixture(autouse=True)
def _limit_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "WORTH_BYTES", 1)
    monkeypatch.setattr(size_limits, "FIRST_BYTES", size_limits.FIRST_BYTES)


LARGE = "import autopipe.workload.model.size_limits as size_limits; size_limits.FIRST_BYTES = 1"


def train(folder: Path, more: str, *words: str, large: bool = False) -> Result:
    (folder / "net.py").write_text(MODEL.replace("{more}", more).replace("{large}", LARGE if large else ""))
    words = ("train", f"{folder / 'net.py'}", "--gpus", "2", "--replicas", "never", "--steps", "1", *words)
    return CliRunner().invoke(autopipe, [*words, "--work-dir", f"{folder / 'work'}", "--run-dir", f"{folder / 'run'}"])


@pytest.mark.parametrize(
    ("more", "notes"),
    [
        ("block[0].weight.mul_(next(COUNT))", 0),  # the build of a rank is the first of its process
        ("orthogonal_(block[0].weight, generator=own)", 0),
        ("block[0].weight.mul_(1 + model[0][0].weight.sum().item())", 1),
    ],
)
def test_the_initial_weights_are_those_of_a_plain_build(tmp_path: Path, more: str, notes: int) -> None:
    done = train(tmp_path, more, "--no-check")
    assert done.exit_code == 0, done.output
    assert done.output.count(NOTE) == notes
    assert_exported_as_built(tmp_path)


@pytest.mark.parametrize("steps", ["1", "3"])
def test_a_large_model_is_trained_from_the_weights_of_a_plain_build(tmp_path: Path, steps: str) -> None:
    """Its size limit is one byte: the command has random weights, and each rank builds its own."""
    done = train(tmp_path, "orthogonal_(block[0].weight)", "--steps", steps, large=True)
    assert done.exit_code == 0, done.output
    assert "this command does not hold its weights" in done.output and NOTE not in done.output
    assert f"{steps} step" in done.output and "compared with plain training: equal, bit for bit" in done.output
    assert_exported_as_built(tmp_path)


def assert_exported_as_built(tmp_path: Path) -> None:
    """The learning rate is 0, so training has changed nothing."""
    exported = tmp_path / "net.safetensors"
    assert CliRunner().invoke(autopipe, ["export", f"{tmp_path / 'run'}", "-o", f"{exported}"]).exit_code == 0
    weights = load_file(exported)
    model = load_workload(LoadOptions(f"{tmp_path / 'net.py'}")).build_model()
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_a_model_that_differs_in_each_build_is_refused_before_training(tmp_path: Path) -> None:
    more = "block[0].weight.mul_(next(COUNT) + 0 * model[0][0].weight.sum().item())"
    done = train(tmp_path, more, "--no-check")
    assert done.exit_code == 3
    assert "gives other initial weights" in done.output and "--init-from FILE" in done.output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
