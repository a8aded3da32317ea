"""Parameters that a model never initializes are zero in every build, and reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autopipe.workload import LoadOptions, load_workload
from autopipe.workload.model.partial import ZeroedMemory

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.table = nn.Parameter(torch.empty(64, 64))
        self.old = nn.Parameter(torch.Tensor(64))
        self.drawn = nn.Parameter(torch.Tensor(64).uniform_())
        self.data_drawn = nn.Parameter(torch.empty(64))
        self.data_drawn.data.normal_()
        self.register_buffer("mean", torch.empty(64))
        self.mean[:] = 3.0

    def forward(self, x):
        return (self.layer(x) @ self.table + self.old + self.drawn + self.data_drawn + self.mean).sum()

def build_model():
    dirty = [torch.full((64, 64), float("nan")) for _ in range(8)]
    del dirty
    return Net()
"""


def test_uninitialized_parameters_are_zero_and_reported(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    workload = load_workload(LoadOptions(str(tmp_path / "net.py")))
    model = workload.build_model()
    assert not model.table.any() and not model.old.any()
    (note,) = workload.build_notes
    assert note.startswith("table and 1 more: never initialized by the model")
    torch.manual_seed(0)
    plain = workload.builder.build()
    for name in ("layer.weight", "layer.bias", "drawn", "data_drawn"):
        assert torch.equal(model.get_parameter(name), plain.get_parameter(name))
    assert torch.equal(model.mean, plain.mean)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3),
        lambda: torch.Tensor(3),
        lambda: torch.FloatTensor(3),
        lambda: torch.ones(1).new(3),
        lambda: torch.ones(1).new_empty(3),
        lambda: torch.empty_like(torch.ones(3)),
        lambda: torch.empty_strided((3,), (1,)),
        lambda: torch.empty(3, dtype=torch.bfloat16),
        lambda: torch.empty(4)[:3],
    ],
)
def test_every_way_to_allocate_memory_is_observed(make) -> None:
    with ZeroedMemory() as memory:
        module = nn.Module()
        module.table = nn.Parameter(make())
        note = memory.note(module)
    assert not module.table.any() and note.startswith("table: never initialized")


def test_initialized_models_have_no_note() -> None:
    with ZeroedMemory() as memory:
        layers = nn.LSTM(4, 4), nn.Embedding(4, 4), nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2), nn.PReLU()
        model = nn.ModuleList([*layers, nn.TransformerEncoderLayer(8, 2)])
        assert memory.note(model) == ""


LARGE = """
import psutil
import torch
from torch import nn

def resident():
    return psutil.Process().memory_info().rss

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4096, 4096))  # 64 MiB
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("table", torch.empty(4096, 64))  # 1 MiB

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        before = resident()
        self.layers = nn.ModuleList(Layer() for _ in range(16))
        self.grown = resident() - before
        self.half = self.layers[0].table + 0.5

    def forward(self, x):
        return x

def build_model():
    return Net()
"""


def test_an_empty_build_takes_no_memory_for_the_parameters(tmp_path):
    (tmp_path / "large.py").write_text(LARGE)
    workload = load_workload(LoadOptions(str(tmp_path / "large.py")))
    model = workload.build_model(empty=True)
    assert model.layers[15].weight.is_meta
    assert model.grown < 64 << 20  # of 1 GiB
    assert not model.layers[3].table.any(), "memory that was never written contains zeros"
    assert (model.half == 0.5).all()
    assert "scale" not in "".join(workload.build_notes)
