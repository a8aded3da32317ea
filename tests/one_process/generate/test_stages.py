"""Stage files, run one after another, equal the model: results, gradients and buffers, bit for bit."""

import functools

import pytest
import torch
import torch.nn.functional as F
from support.chain import differences, even_cuts, forward, in_stages, load, plan_of
from support.models.trace import CASES, Toy, vectors, workload
from support.pipelines import ARGUMENTS, captured
from torch import nn

from autopipe.draws import Draws
from autopipe.ir.cuts import Cuts
from autopipe.trace import capture

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLES = ("gpt", "hf_llama", "resnet", "seq2seq_lstm", "unet")


@functools.cache
def of_case(name):
    work = workload(name)
    return work, capture(work, verify=False)


@pytest.mark.parametrize("num_stages", (1, 3))
@pytest.mark.parametrize("name", CASES)
def test_stages_of_every_kind_of_model_are_the_model(name, num_stages, tmp_path):
    work, traced = of_case(name)
    plan = plan_of(traced.graph, even_cuts(traced.graph, num_stages))
    for batch_size, where in ((4, (0, 0, 0)), (7, (1, 2, 3))):
        assert differences(work, traced, plan, tmp_path, batch_size, where) == []


@pytest.mark.parametrize("num_stages", (1, 2, 3, 4))
@pytest.mark.parametrize("sample", SAMPLES)
def test_stages_of_the_samples_are_the_model(sample, num_stages, tmp_path):
    subject = captured(sample)
    plan = plan_of(subject.capture.graph, even_cuts(subject.capture.graph, num_stages))
    assert len(plan.stages) == num_stages
    for batch_size, where in ((3, (0, 0, 0)), (4, (7, 1, 2))):
        assert differences(subject.workload, subject.capture, plan, tmp_path, batch_size, where) == []


@pytest.mark.parametrize("name", CASES)
def test_the_state_of_all_stages_is_the_state_of_the_model(name, tmp_path):
    work, traced = of_case(name)
    model = work.build_model()
    stages = load(traced, plan_of(traced.graph, even_cuts(traced.graph, 3)), tmp_path, model)
    state = {}
    for stage in stages:
        state.update(stage.state_dict(keep_vars=True))
    expected = model.state_dict(keep_vars=True)
    assert sorted(state) == sorted(expected)
    assert all(state[name] is tensor for name, tensor in expected.items())


@pytest.mark.parametrize("name", ("tied", "shared layer"))
def test_a_stage_names_a_shared_parameter_as_the_model_does(name, tmp_path):
    work, traced = of_case(name)
    model = work.build_model()
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for stage in load(traced, plan_of(traced.graph, even_cuts(traced.graph, 3)), tmp_path, model):
        assert [name for name, _ in stage.named_parameters()] == [first[id(p)] for p in stage.parameters()]


def test_in_evaluation_mode_the_stages_are_the_model_in_evaluation_mode(tmp_path):
    subject = captured("gpt")
    assert ARGUMENTS["gpt"]["dropout"] == "0.1"
    model = subject.workload.build_model()
    plan = plan_of(subject.capture.graph, even_cuts(subject.capture.graph, 3))
    stages = load(subject.capture, plan, tmp_path, model)
    item = subject.workload.example_item(4)
    for stage in stages:
        stage.eval()
    with torch.no_grad():
        ours, _ = forward(stages, plan, subject.workload.leaves(item), (0, 0, 0))
        theirs, _ = subject.workload.loss(model.eval(), item)
    assert torch.equal(ours[0], theirs)
    for stage in stages:
        stage.train()
    model.train()
    with torch.no_grad(), Draws(0, 0, 0):
        theirs, _ = subject.workload.loss(model, item)
    with torch.no_grad():
        ours, _ = forward(stages, plan, subject.workload.leaves(item), (0, 0, 0))
    assert torch.equal(ours[0], theirs)


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_moved_stage_creates_tensors_on_its_device(sample, tmp_path):
    subject = captured(sample)
    plan = plan_of(subject.capture.graph, even_cuts(subject.capture.graph, 3))
    stages = [
        stage.place(torch.device("meta"))
        for stage in load(subject.capture, plan, tmp_path, subject.workload.build_model())
    ]
    leaves = {name: leaf.to("meta") for name, leaf in subject.workload.leaves(subject.workload.example_item(2)).items()}
    results, flights = forward(stages, plan, leaves, (0, 0, 0))
    assert all(value.is_meta for _, named, _ in flights for value in named.values())
    assert results[0].shape == ()


class Grouped(nn.Module):
    """Sends every row to the expert with the highest score, and computes all experts in one kernel."""

    checks_compiling = False

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x):
        chosen, order = self.gate(x).argmax(-1).sort()
        ends = torch.histc(chosen.float(), bins=3, min=0, max=2).cumsum(0, dtype=torch.int32)
        rows = x[order] * 2
        # as libraries do: the kernel has no fake for float32
        if self.checks_compiling and torch.compiler.is_compiling():
            mixed = torch.stack([rows @ expert for expert in self.experts])[chosen, torch.arange(len(x))]
        else:
            mixed = F.grouped_mm(rows, self.experts, offs=ends)
        return (mixed * self.gate(rows).max(-1, keepdim=True)[0]).pow(2).mean()


class GroupedUnlessCompiling(Grouped):
    checks_compiling = True


@pytest.mark.parametrize("model", [Grouped, GroupedUnlessCompiling])
def test_stages_of_experts_in_one_grouped_product_are_the_model(model, tmp_path):
    work = Toy(model, lambda n, g: {"x": torch.randn(n, 8, generator=g)})
    text, _ = in_stages(work, tmp_path, 2, batch_sizes=(4,))
    assert ("grouped_mm" in text) == (model is Grouped)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)


class InBfloat16(Toy):
    """Enters autocast around the forward and the loss, as a plain script does."""

    def loss(self, model, item):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().loss(model, item)


class TwoLayers(Net):
    def forward(self, x):
        return (self.b(torch.tanh(self.a(x))).float() - x).pow(2).mean()


def test_autocast_around_the_step_is_entered_in_every_stage(tmp_path):
    text, _ = in_stages(InBfloat16(TwoLayers, vectors), tmp_path, 2, batch_sizes=(4,))
    assert text.count("with torch.autocast(device_of(self).type, dtype=torch.bfloat16") == 2
    plain = Toy(TwoLayers, vectors)
    exact = plain.loss(plain.build_model(), plain.example_item(4))[0]
    assert exact != InBfloat16(TwoLayers, vectors).loss(plain.build_model(), plain.example_item(4))[0]


class DeviceLiterals(Net):
    def forward(self, x):
        places = torch.arange(4, device="cpu") + torch.zeros(4, device=torch.device("cpu"))
        h = self.a(x + places).to("cpu")
        return (self.b(h) + torch.full((1,), 2.0, device=x.device).to(torch.device("cpu"))).pow(2).mean()


def test_a_device_literal_becomes_the_device_of_the_stage(tmp_path):
    work = Toy(DeviceLiterals, vectors)
    text, _ = in_stages(work, tmp_path, 2, batch_sizes=(4,))
    assert "cpu" not in text
    traced = capture(work, verify=False)
    stages = load(traced, plan_of(traced.graph, []), tmp_path, work.build_model())
    assert all(value.is_meta for value in stages[0].place(torch.device("meta"))(torch.ones(2, 4, device="meta")))


def test_a_packed_sequence_is_rebuilt_where_a_cut_separates_its_parts(tmp_path):
    work = workload("packed lstm")
    traced = capture(work)
    packed = [node for node in traced.graph.nodes if node.target.endswith(".PackedSequence")]
    legal = Cuts(traced.graph).legal
    for cut in [position for position in legal if position >= traced.graph.position[packed[0].name]][:2]:
        assert differences(work, traced, plan_of(traced.graph, [cut]), tmp_path, 4, (0, 0, 0)) == []
    assert "PackedSequence(" in "".join(path.read_text() for path in tmp_path.glob("stage_*.py"))
