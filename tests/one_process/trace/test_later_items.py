"""A data hook that changes, from batch to batch, what the forward reads is seen, wherever it keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models.surveyed import surveyed

from autopipe.trace.tape.survey import NOTHING, Survey

MODEL = """
import decimal
import os
import pathlib
import sys
import torch
from torch import nn

{top}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    def forward(self, x):
        return self.down(self.norm(self.up(x)).tanh()) * {factor}

def build_model():
    return Net()

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for step in range(6):
        {change}
        yield torch.randn(batch_size, 4, generator=g), torch.randint(0, 2, (batch_size,), generator=g)
"""
DEFAULTS = "def scale(by=1.0):\n    return by\n\n"
CHANGING = {
    "a setting": ("", "sys.getrecursionlimit() / 1000", "sys.setrecursionlimit(1000 + step)"),
    "a setting set late": ("", "decimal.getcontext().prec", "decimal.getcontext().prec = 28 - (step > 2)"),
    "default arguments": (DEFAULTS, "scale()", "scale.__defaults__ = (1.0 + step,)"),
    "a file": ("", "float(pathlib.Path('scale').read_text())", "pathlib.Path('scale').write_text(str(1.0 + step))"),
    "the environment": ("", "float(os.environ.get('SCALE', '1'))", "os.environ['SCALE'] = str(1.0 + step)"),
    # two runs differ by rounding, as on a GPU
    "beside rounding": (
        "import ctypes\nget = ctypes.CDLL(None).getenv\nget.restype = ctypes.c_char_p\n",
        "float(get(b'SCALE') or 1) * (1 + 2e-8 * os.urandom(1)[0])",
        "os.putenv('SCALE', str(1.0 + step))",
    ),
}
HARMLESS = {
    "nothing": ("", "1.0", "pass"),
    "a setting that is not read": ("", "1.0", "sys.setrecursionlimit(1000 + step)"),
    "a file that is not read": ("", "1.0", "pathlib.Path('log').write_text(str(step))"),
    "random numbers": ("", "1.0", "torch.rand(3)"),
    "data that fails later": ("", "1.0", "assert step < 2"),
}


@pytest.fixture(autouse=True)
def _restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scale").write_text("1.0")
    monkeypatch.setenv("SCALE", "1.0")


def survey_of(case: tuple[str, str, str], folder: Path) -> Survey:
    top, factor, change = case
    path = folder / "model.py"
    path.write_text(MODEL.format(top=top, factor=factor, change=change))
    return surveyed(path)


@pytest.mark.parametrize("name", CHANGING)
def test_state_that_later_batches_change_is_seen(name: str, tmp_path: Path) -> None:
    survey = survey_of(CHANGING[name], tmp_path)
    assert survey.first is not None and "does not do the same for each batch" in survey.first.text


def test_a_forward_that_reads_the_clock_is_seen(tmp_path: Path) -> None:
    assert survey_of(("import time\n", "(1 + time.perf_counter() % 1)", "pass"), tmp_path).first is not None


@pytest.mark.parametrize("name", HARMLESS)
def test_other_data_changes_nothing(name: str, tmp_path: Path) -> None:
    assert survey_of(HARMLESS[name], tmp_path) == NOTHING
