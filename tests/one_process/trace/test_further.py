"""Cases from models of public repositories."""

import pytest
import torch
import torch.nn.functional as F
from support.chain import differences, even_cuts, plan_of
from support.trace_cases import Toy, vectors
from torch import nn

from autopipe.errors import TraceError
from autopipe.trace import capture


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


def in_stages(model, folder, batch=vectors):
    """Return the text of three stages, or fewer, which are the model at two batch sizes; and the graph."""
    work = Toy(model, batch)
    traced = capture(work)
    plan = plan_of(traced.graph, even_cuts(traced.graph, 3))
    for size in (4, 7):
        assert differences(work, traced, plan, folder, size, (0, 0, 0)) == []
    return "".join(path.read_text() for path in sorted(folder.glob("stage_*.py"))), traced.graph


class Powers(Base):
    def forward(self, x):
        h = self.a(x) ** 2 + 2**x + x ** (x > 0)
        h **= 2
        return self.b(h).mean()


def test_powers_are_written_as_powers(tmp_path):
    text, _ = in_stages(Powers, tmp_path)
    assert "self.a(x) ** 2" in text and "2 ** x" in text and "x ** (x > 0)" in text


class Converting(Base):
    """Puts a layer where it is already, at every step, as some routers do."""

    to = torch.float32

    def forward(self, x):
        self.b = self.b.to(self.to)
        return self.b(self.a(x).to(self.to)).float().pow(2).mean()


class ConvertingToHalf(Converting):
    to = torch.bfloat16


def test_a_layer_that_is_moved_to_where_it_is_stays_itself(tmp_path):
    text, graph = in_stages(Converting, tmp_path)
    assert "self.b(" in text
    assert list(graph.parameters) == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_a_layer_that_the_forward_converts_is_refused_with_both_types():
    with pytest.raises(TraceError, match=r"converts Linear: torch\.float32 to torch\.bfloat16") as caught:
        capture(Toy(ConvertingToHalf, vectors))
    assert "self.b = self.b.to(self.to)" in caught.value.where
    assert caught.value.remedy.startswith("do it where the model is built")


class Listed(Base):
    """Takes the batch apart into a list and puts it together again, as models of pictures and text do."""

    def forward(self, x):
        rows = list(self.a(x))
        joined = torch.cat([row[None] for row in rows[:1]] + [torch.cat(rows)[None, :4]])
        stacked = torch.stack(list(self.b(x)), dim=0)
        stacked.mul_(2)
        return (torch.cat(rows).view(-1, 4) + stacked).pow(2).mean() + joined.sum()


def test_a_batch_that_is_listed_and_joined_again_is_one_call_at_every_size(tmp_path):
    text, graph = in_stages(Listed, tmp_path)
    assert len([node for node in graph.nodes if node.target == "flatten"]) == 2
    assert "torch.stack" not in text


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(torch.cat([row.mean(0, keepdim=True) for row in x])).pow(2).mean()


def test_work_on_every_sample_by_itself_is_refused_with_its_line():
    with pytest.raises(TraceError, match="only takes batches of") as caught:
        capture(Toy(Pictures, lambda n, g: {"x": torch.randn(n, 3, 4, generator=g)}))
    assert "for row in x" in caught.value.where


class Mapped(Base):
    def forward(self, x):
        return torch.vmap(lambda row: (row * row).mean())(self.a(x)).mean()


def test_a_function_transform_is_followed_by_another_way(tmp_path):
    work = Toy(Mapped, vectors)
    traced = capture(work)
    assert "torch.export" in traced.method
    plan = plan_of(traced.graph, even_cuts(traced.graph, 2))
    assert differences(work, traced, plan, tmp_path, 4, (0, 0, 0)) == []


class Resized(Base):
    """As large as the data says."""

    def forward(self, x):
        size = (x > 0).sum() + 1
        return F.interpolate(self.a(x)[:, None], size=[size], mode="nearest").pow(2).mean()


def test_a_size_that_the_data_decides_is_said_to_be_that():
    with pytest.raises(TraceError, match="depends on the numbers in the batch") as caught:
        capture(Toy(Resized, vectors))
    assert "F.interpolate" in caught.value.where


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        result = self.down(F.silu(self.gate(x)) * self.up(x))
        return result * 2


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        batch, width = x.shape
        for block in self.blocks:
            hidden = block(x)
            x = x + hidden
        for layer in self.layers:
            x = layer(x)
        pairs = x.view(batch * 2, width // 2).repeat(1, 2)
        return self.finished(pairs)

    def finished(self, values):
        return values.pow(2).mean()


def test_what_a_function_returns_has_the_callers_name_and_sizes_are_written_where_they_are_read(tmp_path):
    text, graph = in_stages(Named, tmp_path)
    names = [node.name for node in graph.nodes]
    assert [name for name in names if name.startswith("hidden")] == ["hidden", "hidden_2"]
    assert [name for name in names if name.startswith(("gate", "up", "result"))] == [
        "gate", "up", "result", "gate_2", "up_2", "result_2",
    ]  # fmt: skip
    assert "x = self.layers[0](x)\n" in text and "x = self.layers[1](" in text
    assert "x.view(batch * 2, 2)" in text


class Looked(Base):
    """Takes its layer by a name that holds a number of the data's."""

    def forward(self, x):
        layers = nn.ModuleDict({"layer_0": self.a, "layer_1": self.b})
        which = (x.sum() > 0).long()
        return layers[f"layer_{which}"](x).pow(2).mean()


def test_a_layer_taken_by_a_name_of_the_datas_is_a_kept_decision():
    captured = capture(Toy(Looked, vectors), allow_data_dependent=True)
    assert [node.target for node in captured.graph.nodes if "guards" in node.target] == ["autopipe.guards.expect"]


class ContiguousWhenLarge(Base):
    """Two batch sizes are two graphs, so sizes are followed as symbols; the noise names the default generator."""

    def forward(self, x):
        h = self.a(x)
        if h.shape[0] >= 64:
            h = h.contiguous()
        noise = torch.randn(h.shape, generator=None, device=h.device, dtype=h.dtype, layout=torch.strided)
        return self.b(h + noise).pow(2).mean()


def test_noise_of_a_symbolic_size_may_name_no_generator(tmp_path):
    _, graph = in_stages(ContiguousWhenLarge, tmp_path)
    assert "symbolic" in graph.captured_by
