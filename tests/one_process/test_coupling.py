"""Whether samples are coupled: found by gradients, in models that draw numbers too, and without false alarms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopipe.trace import capture
from autopipe.workload import LoadOptions, load_workload

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn

def data(batch_size=5):
    g = torch.Generator().manual_seed(0)
    while True:
        x = torch.randn(batch_size, 8, generator=g)%(cast)s
        yield x, torch.randint(0, 4, (batch_size,), generator=g)

def loss(output, target):
    return F.cross_entropy(output, target)

class Noise(nn.Module):
    def forward(self, x):
        a, b = x.chunk(2, -1)
        return a + torch.randn_like(a) * (0.1 * b).exp()

"""
# what the model is, and whether its samples are coupled
MODELS = {
    "linear": ("nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))", False),
    "dropout": ("nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4))", False),
    "noise": ("nn.Sequential(nn.Linear(8, 16), Noise(), nn.ReLU(), nn.Linear(8, 4))", False),
    "batch norm": ("nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))", False),
    "zero start": ("zeroed(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))", False),
    "bfloat16": ("nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], nn.Linear(8, 4)).to(torch.bfloat16)", False),
    "attention": ("nn.Sequential(nn.Unflatten(1, (2, 4)), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), "
                  "nn.Flatten(), nn.Linear(8, 4))", False),
    "whitened": ("nn.Sequential(nn.Linear(8, 16), Whiten(), nn.Linear(16, 4))", True),
    "whitened noise": ("nn.Sequential(nn.Linear(8, 16), Noise(), Whiten(), nn.Dropout(0.1), nn.Linear(8, 4))", True),
    "whitened, bfloat16": ("nn.Sequential(nn.Linear(8, 16), Whiten(), nn.Linear(16, 4)).to(torch.bfloat16)", True),
}  # fmt: skip
TAIL = """
class Whiten(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0) + 0.1)

def zeroed(model):
    nn.init.zeros_(model[-1].weight)
    return model

def build_model():
    return %s
"""


@pytest.mark.parametrize("name", MODELS)
def test_only_coupled_samples_are_reported_and_the_model_stays_as_it_was(name: str, tmp_path: Path) -> None:
    text, coupled = MODELS[name]
    path = tmp_path / "model.py"
    path.write_text(HEAD % {"cast": ".bfloat16()" if "bfloat16" in name else ""} + TAIL % text)
    workload = load_workload(LoadOptions(str(path)))
    model = workload.build_model()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    memory = [parameter.data_ptr() for parameter in model.parameters()]
    random = torch.get_rng_state()
    notes = capture(workload, model=model).notes
    assert any("couples the samples" in note for note in notes) == coupled, notes
    assert any("batch statistics" in note for note in notes) == (name == "batch norm")
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.data_ptr() for parameter in model.parameters()] == memory
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
