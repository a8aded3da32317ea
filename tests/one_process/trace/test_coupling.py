"""Coupled samples are detected by gradients, even in models with random numbers, without false alarms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.trace import Toy, images, workload

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

%(loss)s

class Noise(nn.Module):
    def forward(self, x):
        a, b = x.chunk(2, -1)
        return a + torch.randn_like(a) * (0.1 * b).exp()

"""
MEAN = """
def loss(output, target):
    return F.cross_entropy(output, target)
"""
# the model, and whether its samples are coupled
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
    "float16": ("nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], nn.Linear(8, 4)).half()", False),
    "bfloat16 in the forward": ("Converts()", False),
    "autocast": ("Autocast(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], nn.Linear(8, 4)))", False),
    "whitened, autocast": ("Autocast(nn.Sequential(nn.Linear(8, 16), Whiten(), nn.Linear(16, 4)))", True),
    "whitened, float16": ("nn.Sequential(nn.Linear(8, 16), Whiten(), nn.Linear(16, 4)).half()", True),
    "a little whitened, bfloat16": ("nn.Sequential(nn.Linear(8, 16), Whiten(0.01), nn.Linear(16, 4)).bfloat16()", True),
    "whitened, bfloat16": ("nn.Sequential(nn.Linear(8, 16), Whiten(), nn.Linear(16, 4)).to(torch.bfloat16)", True),
}  # fmt: skip
TAIL = """
class Whiten(nn.Module):
    def __init__(self, part=1.0):
        super().__init__()
        self.part = part

    def forward(self, x):
        return (1 - self.part) * x + self.part * (x - x.mean(0)) / (x.std(0) + 0.1)

class Converts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = (x.bfloat16() @ layer.weight.bfloat16()).float()
        return x[:, :4]

class Autocast(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(x)

def zeroed(model):
    nn.init.zeros_(model[-1].weight)
    return model

def build_model():
    return %s
"""


@pytest.mark.parametrize("name", MODELS)
def test_only_coupled_samples_are_reported_and_the_model_is_unchanged(name: str, tmp_path: Path) -> None:
    text, coupled = MODELS[name]
    path = tmp_path / "model.py"
    cast = ".bfloat16()" if name.endswith("bfloat16") else ".half()" if "float16" in name else ""
    path.write_text(HEAD % {"cast": cast, "loss": MEAN} + TAIL % text)
    workload = load_workload(LoadOptions(str(path)))
    model = workload.build_model()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    memory = [parameter.data_ptr() for parameter in model.parameters()]
    random = torch.get_rng_state()
    captured = capture(workload, model=model)
    assert ("couples the samples" in captured.coupling.text()) == coupled == bool(captured.coupling.error)
    assert any("batch statistics" in note for note in captured.notes) == (name == "batch norm")
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.data_ptr() for parameter in model.parameters()] == memory
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


VAE = "nn.Sequential(nn.Linear(8, 16), Noise(), nn.ReLU(), nn.Linear(8, 8))"
DROPS = "nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 8))"
UNREAD = "torch.linalg.vector_norm(output - one_hot(target), ord=1)"  # a sum, but not a known call of sum
# model, loss, the report, the divisor of the loss
LOSSES = {
    "a mean": (DROPS, "F.mse_loss(output, one_hot(target))", "", ""),
    "a sum": (VAE, 'F.mse_loss(output, one_hot(target), reduction="sum")', "", "a sum over the batch"),
    "a VAE's two sums": (
        VAE,
        'F.binary_cross_entropy_with_logits(output, one_hot(target), reduction="sum")'
        " - 0.5 * torch.sum(1 + output - output.pow(2) - output.exp())",
        "", "a sum over the batch",
    ),
    "a sum with dropout": (DROPS, "(output - one_hot(target)).pow(2).sum(-1).sum()", "", "a sum over the batch"),
    "a sum in another form, drawing": (VAE, UNREAD, "is a sum over the samples", ""),
    "a sum in another form, dropping": (DROPS, UNREAD, "is a sum over the samples", ""),
    "pairs, dropping": (DROPS, "F.cross_entropy(output @ output.T, torch.arange(len(output)))", "couples the samp", ""),
    "pairs, drawing": (VAE, "torch.pdist(output).mean()", "couples the samples", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_sum_over_the_batch_is_recognised_or_reported_in_random_models(name: str, tmp_path: Path) -> None:
    model, loss, reported, divisor = LOSSES[name]
    text = f"one_hot = lambda target: F.one_hot(target, 8).float()\n\ndef loss(output, target):\n    return {loss}\n"
    path = tmp_path / "model.py"
    path.write_text(HEAD % {"cast": "", "loss": text} + TAIL % model)
    captured = capture(load_workload(LoadOptions(str(path))))
    coupling = captured.coupling
    assert reported in coupling.text() and bool(reported) == bool(coupling.error)
    assert divisor in captured.graph.divisor and bool(divisor) == bool(captured.graph.divisor)
    assert ("reduction='sum'" in coupling.text()) == ("sum" in reported)


def test_batch_statistics_are_noted():
    notes = capture(Toy(workload("batch norm")._build, images)).notes
    assert any("batch statistics (norm and 1 more)" in note for note in notes)
