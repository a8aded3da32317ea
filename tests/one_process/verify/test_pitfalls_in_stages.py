"""Ways in which a right capture can still train wrongly: what stages, their files and a second attempt must keep."""

import logging

import pytest
import torch
import torch.nn.functional as F
from support.chain import differences, even_cuts, load, plan_of
from support.trace_cases import Toy, vectors, workload
from torch import nn

from autopipe.errors import TraceError
from autopipe.ir.cuts import Cuts
from autopipe.trace import capture
from autopipe.trace.record.follow import follow


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)


def in_two(work, folder, **options):
    """Return what differs between the model and its two stages, and the text of the stages."""
    traced = capture(work, **options)
    plan = plan_of(traced.graph, even_cuts(traced.graph, 2))
    assert len(plan.stages) == 2
    wrong = differences(work, traced, plan, folder, 4, (0, 0, 0))
    return wrong, "".join(path.read_text() for path in sorted(folder.glob("stage_*.py")))


def test_pitfall_05_padding_keeps_a_symbolic_batch_symbolic():
    class Padding(Net):
        def forward(self, x):
            h = F.pad(self.a(x), (1, 1))
            return torch.baddbmm(h[:, None], h[:, None], torch.eye(10).expand(x.shape[0], 10, 10)).pow(2).mean()

    work = Toy(Padding, vectors)
    recording = follow(work, work.build_model(), work.example_item(5))
    shapes = {node.target: node.meta["val"].shape for node in recording.graph.nodes if "val" in node.meta}
    assert isinstance(shapes[F.pad][0], torch.SymInt)
    assert isinstance(shapes[torch.baddbmm][0], torch.SymInt)


class Grouped(nn.Module):
    """Every row goes to the expert that scores highest, all experts in one call of a kernel."""

    asks = False

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x):
        chosen, order = self.gate(x).argmax(-1).sort()
        ends = torch.histc(chosen.float(), bins=3, min=0, max=2).cumsum(0, dtype=torch.int32)
        rows = x[order] * 2
        if self.asks and torch.compiler.is_compiling():  # as libraries do: the kernel has no fake for float32
            mixed = torch.stack([rows @ expert for expert in self.experts])[chosen, torch.arange(len(x))]
        else:
            mixed = F.grouped_mm(rows, self.experts, offs=ends)
        return (mixed * self.gate(rows).max(-1, keepdim=True)[0]).pow(2).mean()


class GroupedOnRequest(Grouped):
    asks = True


@pytest.mark.parametrize("model", [Grouped, GroupedOnRequest])
def test_pitfall_06_experts_in_one_grouped_product_are_followed(model, tmp_path):
    work = Toy(model, lambda n, g: {"x": torch.randn(n, 8, generator=g)})
    wrong, text = in_two(work, tmp_path)
    assert wrong == []
    assert ("grouped_mm" in text) == (model is Grouped)


class Halved(Toy):
    """A plain script's autocast around the forward and the loss."""

    def loss(self, model, item):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().loss(model, item)


class TwoLayers(Net):
    def forward(self, x):
        return (self.b(torch.tanh(self.a(x))).float() - x).pow(2).mean()


def test_pitfall_17_autocast_around_the_step_is_opened_in_every_stage(tmp_path):
    wrong, text = in_two(Halved(TwoLayers, vectors), tmp_path)
    assert wrong == []
    assert text.count("with torch.autocast(device_of(self).type, dtype=torch.bfloat16") == 2
    plain = Toy(TwoLayers, vectors)
    exact = plain.loss(plain.build_model(), plain.example_item(4))[0]
    assert exact != Halved(TwoLayers, vectors).loss(plain.build_model(), plain.example_item(4))[0]


class Literals(Net):
    def forward(self, x):
        places = torch.arange(4, device="cpu") + torch.zeros(4, device=torch.device("cpu"))
        h = self.a(x + places).to("cpu")
        return (self.b(h) + torch.full((1,), 2.0, device=x.device).to(torch.device("cpu"))).pow(2).mean()


def test_pitfall_18_a_device_that_the_model_names_is_the_stages_own(tmp_path):
    work = Toy(Literals, vectors)
    wrong, text = in_two(work, tmp_path)
    assert wrong == []
    assert "cpu" not in text
    traced = capture(work, verify=False)
    stages = load(traced, plan_of(traced.graph, []), tmp_path, work.build_model())
    assert all(value.is_meta for value in stages[0].place(torch.device("meta"))(torch.ones(2, 4, device="meta")))


def test_pitfall_19_a_packed_sequence_is_made_by_its_own_call(tmp_path):
    work = workload("packed lstm")
    traced = capture(work)
    packed = [node for node in traced.graph.nodes if node.target.endswith(".PackedSequence")]
    legal = Cuts(traced.graph).legal
    for cut in [position for position in legal if position >= traced.graph.position[packed[0].name]][:2]:
        assert differences(work, traced, plan_of(traced.graph, [cut]), tmp_path, 4, (0, 0, 0)) == []
    assert "PackedSequence(" in "".join(path.read_text() for path in tmp_path.glob("stage_*.py"))


class Failing(Net):
    def forward(self, x):
        torch.set_grad_enabled(False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x[: x.shape[0] // 2 + 1])
            return h[: int(h.sum())].mean()


def test_pitfall_20_a_refused_model_spoils_nothing_for_the_next(tmp_path):
    item = vectors(5, torch.Generator().manual_seed(1))
    failing = Toy(Failing, lambda n, g: item if n == 5 else vectors(n, g))
    with pytest.raises(TraceError):
        capture(failing)
    assert vars(item["x"]) == {}  # no mark of a symbolic dimension
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert capture(Toy(TwoLayers, lambda n, g: item if n == 5 else vectors(n, g))).exact


class OnlyInFull(Net):
    """What torch's fake of a product cannot do, and torch itself can."""

    def forward(self, x):
        return torch.mm(self.a(x), self.a(x).t() if torch.compiler.is_compiling() is False else self.a(x)).mean()


def test_what_torch_says_of_a_fake_call_that_fails_is_not_shown_besides_the_error(caplog):
    with caplog.at_level(logging.DEBUG), pytest.raises(TraceError, match="followed in mm"):
        capture(Toy(OnlyInFull, vectors))
    assert [record for record in caplog.records if record.name.startswith("torch._sub")] == []
