"""A rank builds its own parameters only, equal to those of a complete build; else it builds all of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from autopipe.errors import RunError
from autopipe.ir.initial_values import InitialValues
from autopipe.ir.tensor import TensorSpec
from autopipe.runtime.checkpoint.initial import build_stages
from autopipe.stage import Stage
from autopipe.workload import LoadOptions, Workload
from autopipe.workload.model import partial
from autopipe.workload.model.digests import digests_of
from autopipe.workload.model.placeholders import is_placeholder

HEAD = """
import contextlib, itertools, random, uuid
import numpy as np
import torch
from torch import nn
from torch.nn.init import orthogonal_  # by this name, it does nothing to a tensor on meta

COUNT = itertools.count(1)

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


@pytest.fixture(autouse=True)
def _every_model_is_worth_dividing(monkeypatch):
    monkeypatch.setattr(partial, "WORTH_BYTES", 1)


def workload_of(tmp_path, more="pass"):
    path = tmp_path / "net.py"
    path.write_text(HEAD.replace("{more}", more))
    return Workload(LoadOptions(f"{path}").spec())


def graph_of(model):
    specs = {name: TensorSpec(tuple(p.shape), "float32") for name, p in model.named_parameters()}

    class Only:
        parameters, aliases = specs, {"head.weight": "words.weight"}

    return Only()


def built(monkeypatch, workload, classes, **options):
    """Return the stages, and how many parameters of every build took memory."""
    real, counts = Workload.build_model, []

    def counted(self, **given):
        model = real(self, **given)
        counts.append(sum(not is_placeholder(p) for p in model.parameters()))
        return model

    graph = graph_of(workload.build_model())
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
    stages, counts = built(monkeypatch, workload, classes, initial=workload.models.initial)
    assert all(same(stage, whole) for stage in stages)
    tied = len(classes) > 1  # both stages have the embedding, as two tensors
    assert counts == [sum(len(list(stage.parameters())) for stage in stages) - tied]


@pytest.mark.parametrize(
    "more",
    [
        "self.blocks[1].weight.data.copy_(self.blocks[0].weight)",  # a value of another stage
        "import copy; self.blocks[1] = copy.deepcopy(self.blocks[0])",
        "torch.nn.init.normal_(self.blocks[1].weight, std=self.blocks[0].weight.std().item())",
        "self.blocks[5].weight.data.copy_(torch.poisson(self.blocks[5].weight.data.abs())); "
        "torch.nn.init.normal_(self.blocks[1].weight)",
    ],
)
def test_what_cannot_be_divided_is_built_complete(monkeypatch, tmp_path, more):
    workload = workload_of(tmp_path, more)
    whole = workload.build_model()
    (stage,), counts = built(monkeypatch, workload, (Middle,), initial=workload.models.initial)
    assert same(stage, whole)
    assert max(counts) == len(list(whole.parameters()))


CAUGHT = "with contextlib.suppress(Exception): self.blocks[1].weight"
UNSEEN = {
    "item": f"\n        {CAUGHT}.data.mul_(2 + self.blocks[0].weight.std().item())",
    "numpy()": f"\n        {CAUGHT}.data.mul_(2 + float(self.blocks[0].weight.detach().numpy().std()))",
    "list": f"\n        {CAUGHT}.data.mul_(2 + self.blocks[0].weight.tolist()[0][0])",
    "tensor of another stage": "self.blocks[1].kept = (self.blocks[0].weight.detach(),)",
    "computed tensor": "self.blocks[1].kept = [self.blocks[0].weight.detach() * 2]",
    "buffer": "self.noise = self.noise + self.blocks[0].weight.detach().sum()",
    "in memory of a stage": "torch.mul(self.blocks[0].weight.detach(), 2, out=self.blocks[1].weight.data)",
    "view before": "p = nn.Parameter(torch.zeros(16)); v = p.data; self.p = p; nn.init.normal_(self.p); "
    "self.blocks[1].bias.data.copy_(v)",
    "two parameters in one memory": "t = torch.zeros(16); self.blocks[0].bias = nn.Parameter(t); "
    "self.blocks[1].bias = nn.Parameter(t); nn.init.normal_(self.blocks[0].bias)",
    "number of chosen elements": "nn.init.constant_(self.blocks[1].weight, "
    "float((self.blocks[0].weight.data > 0).nonzero().shape[0]))",
    "draws by number": "torch.randn(len(self.blocks[0].weight.data[self.blocks[0].weight.data > 0])); "
    "nn.init.normal_(self.blocks[1].weight)",
    "tensor of tensors": "self.blocks[1].weight.data.mul_(torch.tensor([self.blocks[0].weight.detach().std()]))",
    "pickled": "import pickle; self.blocks[1].weight.data = pickle.loads(pickle.dumps(self.blocks[0].weight.data))",
    "saved": "import io; b = io.BytesIO(); torch.save(self.blocks[0].state_dict(), b); b.seek(0); "
    "self.blocks[1].load_state_dict(torch.load(b))",
    "copied to itself": "w = self.blocks[0].weight.data; w.copy_(w); self.blocks[1].weight.data.copy_(w)",
    "lost content": "self.last = None; nn.init.normal_(self.blocks[0].weight); nn.init.normal_(self.blocks[5].weight); "
    "self.blocks[1].weight.data.copy_(self.blocks[0].weight)",
}


@pytest.mark.parametrize("known", ["digests", "numbers"])
@pytest.mark.parametrize("more", [pytest.param(more, id=name) for name, more in UNSEEN.items()])
def test_what_the_global_generator_does_not_show_is_built_complete(monkeypatch, tmp_path, more, known):
    workload = workload_of(tmp_path, more)
    whole = workload.build_model()
    reasons, initial = [], workload.models.initial
    (stage,), counts = built(
        monkeypatch,
        workload,
        (Middle,),
        initial=initial if known == "digests" else InitialValues(numbers=initial.numbers),
        on_complete_build=lambda reason: reasons.append(reason),
    )
    assert same(stage, whole) and digests_of(stage).items() <= digests_of(whole).items()
    assert max(counts) == len(list(whole.parameters())) and len(reasons) == 1


DIVIDED = {
    "own generator": "g = torch.Generator(); [orthogonal_(b.weight, generator=g) for b in self.blocks]",
    "given generator": "g = torch.Generator(); [nn.init.normal_(b.weight, generator=g) for b in self.blocks]",
    "sparse": "g = torch.Generator(); [nn.init.sparse_(b.weight, 0.5, generator=g) for b in self.blocks]",
    "copies of draws": "g = torch.Generator().manual_seed(1); [b.weight.data.copy_(torch.randn(16, 16, generator=g, "
    "device=b.weight.device)) for b in self.blocks]",
    "forked": "\n        with torch.random.fork_rng(devices=()):\n            "
    "[orthogonal_(b.weight) for b in self.blocks]",
    "restored": "s = torch.get_rng_state(); [orthogonal_(b.weight) for b in self.blocks]; torch.set_rng_state(s)",
    "seeded later": "[orthogonal_(b.weight) for b in self.blocks]; torch.manual_seed(2)",
    "numpy": "[b.weight.data.fill_(np.random.rand()) for b in self.blocks if not b.weight.is_meta]",
    "random": "[b.weight.data.fill_(random.random()) for b in self.blocks if not b.weight.is_meta]",
    "rejected draws": "\n        for b in self.blocks:\n            nn.init.normal_(b.weight)\n            "
    "while b.weight.abs().max().item() > 2.5: nn.init.normal_(b.weight)",
    "address": "[b.weight.data.fill_(torch.rand(()).item()) for b in self.blocks if b.weight.data_ptr()]",
    "buffer": "orthogonal_(self.blocks[0].weight); self.noise.normal_(); torch.manual_seed(2)",
    "number": "orthogonal_(self.blocks[0].weight); self.blocks[1].scale = torch.rand(()).item()",
    "tensor in a list": "orthogonal_(self.blocks[0].weight); self.blocks[1].kept = [torch.rand(2)]",
    "device": "self.blocks[1].bias.requires_grad_(self.blocks[0].weight.is_meta)",
    "the same object": "\n        w = nn.Parameter(torch.empty(16, 16)); self.blocks[0].weight = w; "
    "nn.init.normal_(self.blocks[0].weight); self.blocks[1].weight.data.copy_(w)",
    "parameters of its own list": "\n        ws = [nn.Parameter(torch.zeros(16, 16)) for _ in range(6)]\n        "
    "for b, w in zip(self.blocks, ws): b.weight = w\n        for w in ws: nn.init.xavier_uniform_(w)",
    "identity": "\n        w = nn.Parameter(torch.zeros(16)); self.blocks[0].bias = w\n        "
    "if self.blocks[0].bias is w: nn.init.ones_(self.blocks[1].bias)",
    "attributes": "\n        for p in self.blocks[0].parameters(): p.slow = p.dim() == 1\n        "
    "if self.blocks[0].bias.slow: nn.init.ones_(self.blocks[1].bias)",
    "computed in another stage": "self.blocks[5].weight.data.copy_(self.blocks[0].weight.data * 2)",
    "kept in another stage": "self.blocks[5].kept = [self.blocks[0].weight.detach() * 2]",
}


def test_memory_that_numpy_uses_is_kept(monkeypatch, tmp_path):
    more = (
        "arr = np.zeros((16, 16), np.float32); self.blocks[0].weight = nn.Parameter(torch.from_numpy(arr)); "
        "nn.init.normal_(self.blocks[0].weight); self.blocks[1].weight.data.copy_(torch.from_numpy(arr))"
    )
    workload = workload_of(tmp_path, more)
    whole = workload.build_model()
    initial = InitialValues(numbers=workload.models.initial.numbers)
    (stage,), counts = built(monkeypatch, workload, (Middle,), initial=initial)
    assert same(stage, whole)
    assert max(counts) == len(list(stage.parameters())) + 1


@pytest.mark.parametrize("known", ["digests", "numbers"])
@pytest.mark.parametrize("more", [pytest.param(more, id=name) for name, more in DIVIDED.items()])
def test_initialization_is_that_of_a_complete_build(monkeypatch, tmp_path, more, known):
    workload = workload_of(tmp_path, more)
    whole = workload.build_model()
    initial = workload.models.initial
    initial = initial if known == "digests" else InitialValues(numbers=initial.numbers)
    (stage,), counts = built(monkeypatch, workload, (Middle,), initial=initial)
    assert same(stage, whole) and digests_of(stage).items() <= digests_of(whole).items()
    assert max(counts) == len(list(stage.parameters()))


def test_an_empty_build_has_the_numbers_of_a_complete_one(tmp_path):
    complete, empty = workload_of(tmp_path), workload_of(tmp_path)
    complete.build_model()
    empty.build_model(empty=True)
    assert empty.models.initial == InitialValues(numbers=complete.models.initial.numbers)


@pytest.mark.parametrize("more", ["self.blocks[1].name = str(uuid.uuid4())", "self.blocks[1].made = [object()]"])
def test_texts_and_objects_do_not_prevent_a_build_in_part(monkeypatch, tmp_path, more):
    workload = workload_of(tmp_path, more)
    whole = workload.build_model()
    (stage,), counts = built(monkeypatch, workload, (Middle,), initial=workload.models.initial)
    assert same(stage, whole)
    assert max(counts) < len(list(whole.parameters()))


COUNTED = "[b.weight.data.mul_(next(COUNT)) for b in self.blocks]"


def test_state_of_the_file_is_that_of_a_first_build(monkeypatch, tmp_path):
    first = workload_of(tmp_path, COUNTED)
    whole = first.build_model()
    workload = workload_of(tmp_path, COUNTED)  # as in the process of a rank
    graph = graph_of(whole)
    (stage,) = build_stages((Middle,), workload, {}, None, graph, first.models.initial)
    assert same(stage, whole)


def test_a_model_that_differs_in_each_build_is_refused(monkeypatch, tmp_path):
    more = f"{COUNTED}; self.blocks[0].weight.sum().item()"
    first = workload_of(tmp_path, more)
    graph, workload = graph_of(first.build_model()), workload_of(tmp_path, more)
    with pytest.raises(RunError, match=r"other initial weights: .*blocks\.1\.weight"):
        build_stages((Middle,), workload, {}, None, graph, first.models.initial)
    # where rounding may differ, a difference shows nothing
    elsewhere = dataclasses.replace(first.models.initial, built_on="another host")
    assert build_stages((Middle,), workload, {}, None, graph, elsewhere)


def test_a_parameter_computed_from_another_one_is_built_complete(monkeypatch, tmp_path):
    workload = workload_of(tmp_path)
    whole = workload.build_model()
    (stage,), counts = built(monkeypatch, workload, (Norm,), initial=workload.models.initial)
    assert same(stage, whole)
    assert max(counts) == 19


def test_a_build_that_asks_for_memory_draws_as_a_complete_one(monkeypatch, tmp_path):
    workload = workload_of(tmp_path, "[nn.init.normal_(b.weight) for b in self.blocks if not b.weight.is_meta]")
    whole = workload.build_model()
    (stage,), counts = built(monkeypatch, workload, (Last,), initial=workload.models.initial)
    assert same(stage, whole)
    assert max(counts) == len(list(stage.parameters()))
