"""Complex numbers in comparisons: a wrong imaginary part is a difference, at capture and in a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autopipe import sparse
from autopipe.errors import TraceError
from autopipe.trace.loss.steady import difference
from autopipe.trace.verify import compare
from autopipe.verify.comparison import Worst, relative_error
from autopipe.verify.in_stages import Trained
from autopipe.verify.plain_runs import PlainRuns

ONE = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.cfloat)

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Parameter(torch.randn(16, 24, dtype=torch.cfloat) / 4)
        self.register_buffer("turn", torch.polar(torch.ones(24), torch.arange(24.0)))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(3))
        self.leave = nn.Parameter(torch.randn(24, 4, dtype=torch.cfloat) / 4)

    def forward(self, x):
        z = (x.to(torch.cfloat) @ self.enter) * self.turn
        h = z.abs()
        for block in self.blocks:
            h = h + block(h)
        return ((h + z) @ self.leave).imag


def build_model():
    return Net()


def data(batch_size=12):
    g = torch.Generator().manual_seed(1)
    for _ in range(6):
        yield torch.randn(batch_size, 16, generator=g), torch.randint(4, (batch_size,), generator=g)


loss = F.cross_entropy
"""


@pytest.mark.parametrize("other", [ONE.conj(), ONE * (1 + 1e-2j), torch.complex(ONE.real, 0 * ONE.real)])
def test_an_imaginary_part_is_compared(other: torch.Tensor) -> None:
    assert relative_error(other.resolve_conj(), ONE) > 5e-3
    assert (difference({"w": sparse.wide(ONE)}, {"w": sparse.wide(other)}) or 0.0) > 5e-3
    with pytest.raises(TraceError, match=r"gradient of w differs, \d.*j"):
        compare("gradient of w", ONE, other, "", "")


def test_equal_complex_tensors_are_equal() -> None:
    whole = torch.tensor([complex("inf"), complex(float("nan"), 0.0), 1 + 1j])
    assert compare("gradient of w", whole, whole.clone(), "", "")
    assert relative_error(ONE, ONE.clone()) == difference({"w": ONE}, {"w": ONE}) == 0.0
    worst = Worst()
    worst.add("w", whole, whole + 1)
    assert worst.nonfinite == ["w"]


@pytest.mark.parametrize(("one", "other"), [("inf", "-inf"), ("inf", "nan"), ("1", "inf")])
def test_infinities_of_another_sign_are_a_difference(one: str, other: str) -> None:
    values = torch.tensor([1.0, float(one)]), torch.tensor([1.0, float(other)])
    with pytest.raises(TraceError):
        compare("buffer mask", *values, "", "")


def test_a_complex_model_is_equal_and_its_conjugated_gradient_is_not(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    command = ("check", "net.py", "--gpus", "2", "--replicas", "never", "--num-microbatches", "2", "--device", "cpu")
    done = run(*command)
    assert done.exit_code == 0, done.stderr
    assert "equal to plain training, to the last bit" in done.stdout and "discards the imaginary" not in done.stderr
    train = PlainRuns.train

    def conjugated(self: PlainRuns, *arguments: Any, **changes: Any) -> Trained:
        trained = train(self, *arguments, **changes)
        for key, gradient in trained.gradients.items():
            if gradient is not None and gradient.is_complex():
                trained.gradients[key] = gradient.conj().resolve_conj()
        return trained

    monkeypatch.setattr(PlainRuns, "train", conjugated)
    done = run(*command, "--precision", "bf16")  # a tolerance, and not bit by bit
    assert done.exit_code == 1
    assert "NOT equal to plain training" in done.stdout + done.stderr
