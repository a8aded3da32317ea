"""A rank builds its own parameters only, equal to those of a complete build; else it builds all of them."""

from __future__ import annotations

import pytest
import torch

from autopipe.ir.tensor import TensorSpec
from autopipe.runtime.checkpoint import initial
from autopipe.runtime.checkpoint.initial import build_stages
from autopipe.stage import Stage
from autopipe.workload import LoadOptions, Workload

HEAD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.own = nn.Parameter(torch.randn(16) + 1)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.register_buffer("noise", torch.randn(16))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.words.weight
        for parameter in self.blocks[2].parameters():
            nn.init.trunc_normal_(parameter) if parameter.dim() > 1 else nn.init.uniform_(parameter)
        nn.init.orthogonal_(self.blocks[4].weight)
        with torch.no_grad():
            self.blocks[1].weight.copy_(torch.rand(16, 16)).mul_(3)
            self.blocks[3].weight.add_(torch.randn_like(self.blocks[3].weight))
        {more}
        self.last = nn.Linear(16, 16)
    def forward(self, x):
        return x

def build_model():
    return Net()

def data():
    return [(torch.zeros(2, 16), torch.zeros(2))]

def loss(output, target):
    return output.sum()
"""


class First(Stage):
    MODULES = ("words", "blocks.0", "blocks.2")
    PARAMETERS = ("own",)


class Middle(Stage):
    INDEX = 1
    MODULES = ("blocks.1", "blocks.3", "blocks.4")
    BUFFERS = ("noise",)


class Norm(Stage):
    MODULES = ("norm",)


class Last(Stage):
    INDEX = 2
    MODULES = ("head", "last", "blocks.5")


def workload_of(tmp_path, more="pass"):
    path = tmp_path / "net.py"
    path.write_text(HEAD.replace("{more}", more))
    return Workload(LoadOptions(f"{path}").spec())


def graph_of(model):
    specs = {name: TensorSpec(tuple(p.shape), "float32") for name, p in model.named_parameters()}

    class Only:
        parameters, aliases = specs, {}

    return Only()


def built(monkeypatch, workload, classes, **options):
    """Return the stages, and how many parameters of every build took memory."""
    real, counts = Workload.build_model, []

    def counted(self, **given):
        model = real(self, **given)
        counts.append(sum(not p.is_meta for p in model.parameters()))
        return model

    graph = graph_of(workload.build_model())
    monkeypatch.setattr(initial, "WORTH_BYTES", 1)
    monkeypatch.setattr(Workload, "build_model", counted)
    return build_stages(classes, workload, {}, None, graph, **options), counts


def same(stage, model):
    values = dict(stage.state_dict())
    assert values and values.keys() <= model.state_dict().keys()
    whole = model.state_dict()
    return all(torch.equal(value, whole[name]) for name, value in values.items())


@pytest.mark.parametrize("classes", [(First,), (Middle,), (Last,), (First, Last)])
def test_own_parameters_equal_those_of_a_complete_build(monkeypatch, tmp_path, classes):
    workload = workload_of(tmp_path)
    whole = workload.build_model()
    stages, counts = built(monkeypatch, workload, classes, draws=workload.models.draws)
    assert all(same(stage, whole) for stage in stages)
    assert len(counts) == 2 and counts[0] == 0
    tied = len(classes) > 1  # both stages have the embedding, as two tensors
    assert counts[1] == sum(len(list(stage.parameters())) for stage in stages) - tied


@pytest.mark.parametrize(
    "more",
    [
        "self.blocks[1].weight.data.copy_(self.blocks[0].weight)",  # a value of another stage
        "import copy; self.blocks[1] = copy.deepcopy(self.blocks[0])",
        "torch.nn.init.normal_(self.blocks[1].weight, std=self.blocks[0].weight.std().item())",
        "self.blocks[5].weight.data.copy_(torch.poisson(self.blocks[5].weight.data.abs()))",
        # a generator of the user's own, which only the complete build advances
        "g = torch.Generator().manual_seed(1); [b.weight.data.copy_(torch.randn(16, 16, generator=g, "
        "device=b.weight.device)) for b in self.blocks]",
    ],
)
def test_what_cannot_be_divided_is_built_complete(monkeypatch, tmp_path, more):
    workload = workload_of(tmp_path, more)
    whole = workload.build_model()
    (stage,), counts = built(monkeypatch, workload, (Middle,), draws=workload.models.draws)
    assert same(stage, whole)
    assert max(counts) == len(list(whole.parameters()))


@pytest.mark.parametrize("initializer", ["sparse_(b.weight, 0.5, generator=g)", "orthogonal_(b.weight, generator=g)"])
def test_initializers_advance_the_users_generator(monkeypatch, tmp_path, initializer):
    more = f"g = torch.Generator().manual_seed(1); [nn.init.{initializer} for b in self.blocks]"
    workload = workload_of(tmp_path, more)
    whole = workload.build_model()
    (stage,), counts = built(monkeypatch, workload, (Middle,), draws=workload.models.draws)
    assert same(stage, whole)
    assert max(counts) < len(list(whole.parameters()))


def test_a_parameter_computed_from_another_one_is_built_complete(monkeypatch, tmp_path):
    workload = workload_of(tmp_path)
    whole = workload.build_model()
    (stage,), counts = built(monkeypatch, workload, (Norm,), draws=workload.models.draws)
    assert same(stage, whole)
    assert max(counts) == 19


def test_a_build_that_draws_less_without_memory_is_built_complete(monkeypatch, tmp_path):
    workload = workload_of(tmp_path, "[nn.init.normal_(b.weight) for b in self.blocks if not b.weight.is_meta]")
    whole = workload.build_model()
    (stage,), counts = built(monkeypatch, workload, (Last,), draws=workload.models.draws)
    assert same(stage, whole)
    assert max(counts) == len(list(whole.parameters()))
