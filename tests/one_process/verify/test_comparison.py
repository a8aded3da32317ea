"""The tolerance where equality is not promised bit for bit, and the reasons."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from autopipe.cli.main import autopipe
from autopipe.verify import comparison
from autopipe.verify.comparison import Comparison, TensorDifference, relative_error


def compared(*tensors: tuple[float, float], loss: float = 1.0) -> Comparison:
    """Return a comparison of tensors with these (errors, noises)."""
    differences = tuple(
        TensorDifference(str(i), error, False, 0, noise, reordered=noise) for i, (error, noise) in enumerate(tensors)
    )
    usual = sorted(noise for _, noise in tensors)[len(tensors) // 2]
    return Comparison(differences, (loss,), (1.0,), False, ("replicas",), usual)


MANY = 3 * comparison._BLOCK + 7  # elements of more than one block


@pytest.mark.parametrize("place", [0, comparison._BLOCK, MANY - 1])
def test_the_error_of_a_tensor_is_that_of_its_worst_element(place):
    ours = torch.linspace(-2, 1, MANY)
    assert relative_error(ours, ours.clone()) == 0
    other = ours.clone()
    other[place] += 0.25
    size = float(other.abs().max())
    assert relative_error(ours, other) == pytest.approx(0.25 / size)
    assert relative_error(ours, other, least=10.0) == pytest.approx(0.025)
    assert relative_error(ours.to(torch.complex64) * 1j, other * 1j) == pytest.approx(0.25 / size)
    other[place] = math.nan
    assert relative_error(ours, other) == relative_error(other, ours) == math.inf
    other[place] = -math.inf
    assert relative_error(other, other.clone()) == 0, "equal values that are infinite"
    assert relative_error(other, ours) == math.inf


def test_tensors_without_elements_or_of_another_shape():
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0
    assert relative_error(torch.zeros(2), torch.zeros(3)) == math.inf


def test_an_error_of_a_few_times_the_noise_is_equal():
    assert compared((3e-5, 1e-5), (2e-5, 1e-5), (1e-5, 1e-5)).equal
    assert not compared((9e-4, 1e-5), (2e-5, 1e-5), (1e-5, 1e-5)).equal


def test_a_tensor_that_is_only_noise_does_not_excuse_others():
    # the bias of keys in attention has the true gradient zero
    assert compared((1.9, 1.0), (2e-7, 1e-7), (1e-7, 1e-7)).equal
    assert not compared((1.9, 1.0), (0.01, 1e-7), (1e-7, 1e-7)).equal


def test_a_tensor_that_is_only_noise_is_not_the_largest_difference():
    noisy = compared((1.9, 1.0), (2e-7, 1e-7), (1e-7, 1e-7))
    assert (noisy.rounding_alone, noisy.max_relative_error) == (("0",), 2e-7)
    assert noisy.tolerance < 1e-5
    wrong = compared((9.0, 1.0), (2e-7, 1e-7), (1e-7, 1e-7))
    assert (wrong.rounding_alone, wrong.max_relative_error, wrong.equal) == ((), 9.0, False)


def test_noise_of_a_compiler_does_not_make_a_tensor_rounding_alone():
    compiled = TensorDifference("0", 0.5, False, 0, 0.4, reordered=1e-7)
    comparison = Comparison((compiled,), (1.0,), (1.0,), False, ("--compile",), 1e-7)
    assert (comparison.rounding_alone, comparison.max_relative_error) == ((), 0.5)


def test_a_loss_has_the_usual_tolerance():
    assert not compared((0.0, 1.0), (0.0, 1e-7), (0.0, 1e-7), loss=1.001).equal


SHORTCUT = """
import torch
from torch import nn

def is_followed():
    return torch.compiler.is_compiling()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.a, self.b = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids, mask):
        h = self.a(self.words(ids)).tanh() if is_followed() else self.a(self.words(ids)).tanh()
        if not is_followed() and mask.all():
            return self.b(h).mean(1) * FACTOR
        return self.b((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))

def build_model():
    return Model()

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def data(batch_size=6):
    g = torch.Generator().manual_seed(1)
    for step in range(3):
        mask = torch.ones(batch_size, 7)
        mask[:, 5:] = float(step > 0)  # the first batch is padded, the others are full
        ids = torch.randint(0, 20, (batch_size, 7), generator=g)
        yield (ids, mask), torch.randint(0, 3, (batch_size,), generator=g)
"""


@pytest.mark.parametrize(("factor", "equal"), [("1.0", True), ("1.001", False)])
def test_a_shortcut_of_later_batches_is_named_with_its_line(factor, equal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(SHORTCUT.replace("FACTOR", factor))
    done = CliRunner().invoke(autopipe, ["check", "net.py", "--gpus", "2", "--steps", "3", "--json"])
    document = json.loads(done.stdout)
    line = SHORTCUT[: SHORTCUT.index("if not is_followed")].count("\n") + 1
    assert any(f"it asks at net.py:{line}, as transformers does" in warning for warning in document["warnings"])
    assert (document["equal"], document["bitwise"]) == (equal, False)


def test_batch_norm_with_two_samples_per_microbatch_is_compared(run: Any, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("""
import torch
from torch import nn
from torch.nn.functional import cross_entropy as loss


def build_model():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))


def data(batch_size):
    while True:
        yield torch.linspace(0, 1, 8 * batch_size).sin().view(batch_size, 8), torch.arange(batch_size) % 3
""")
    options = ["--gpus", "2", "--replicas", "never", "--num-microbatches", "3", "--batch-size", "6"]
    done = run("check", "model.py", *options, "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    assert "equal to plain training, to the last bit" in done.stdout
