"""A test for each way in which a capture can be silently wrong; those of its stages are in test_pitfalls_in_stages."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.trace_cases import Toy, images, tokens, vectors, workload
from torch import nn

from autopipe.errors import RunError, TraceError
from autopipe.ir.cuts import Cuts
from autopipe.trace import capture, replay


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)


class MaskShortcut(nn.Module):
    """Drops an all-ones mask unless it is being compiled, as transformers does."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 4)

    def forward(self, ids, mask):
        h = self.embed(ids)
        if not torch.compiler.is_compiling() and mask.all():
            return h.pow(2).mean()
        return (h * mask[..., None]).pow(2).sum() / mask.sum() / 4


def test_pitfall_01_a_mask_of_ones_is_not_taken_for_no_mask():
    def batch(n, generator):
        item = tokens(n, generator)
        mask = torch.ones(n, 9)
        if n != 5:
            mask[:, 6:] = 0
        return {**item, "mask": mask}

    captured = capture(Toy(MaskShortcut, batch))
    assert any("mask" in node.inputs for node in captured.graph.nodes)


def test_pitfall_02_a_read_of_the_data_is_refused_unless_it_is_kept_with_a_guard():
    class Branch(Base):
        def forward(self, x):
            h = self.a(x)
            return h.mean() if x.max() > 100 else h.pow(2).mean()

    with pytest.raises(TraceError, match="depends on the numbers in the batch"):
        capture(Toy(Branch, vectors))
    captured = capture(Toy(Branch, vectors), allow_data_dependent=True)
    assert [n.target for n in captured.graph.nodes if "guards" in n.target] == ["autopipe.guards.expect"]


def test_pitfall_03_coins_of_numpy_are_found_even_from_a_generator_of_its_own():
    class OwnGenerator(Base):
        def forward(self, x):
            return (self.a(x) * float(np.random.default_rng().random())).pow(2).mean()

    with pytest.raises(TraceError, match="the captured graph is not the model"):
        capture(Toy(OwnGenerator, vectors))


def test_pitfall_04_the_batch_size_is_not_baked():
    class Reshaping(Base):
        def forward(self, x):
            n, width = x.shape
            h = self.a(x).view(n * 2, width // 2)
            return (h + torch.zeros(2 * len(x), 1)).view(n, -1).pow(2).sum() / n

    captured = capture(Toy(Reshaping, vectors))
    assert captured.exact
    assert {"operator.mul"} <= {node.target for node in captured.graph.nodes if node.spec is None}


def test_pitfall_04_a_square_of_the_batch_size_is_not_taken_for_a_line():
    class Pairs(Base):
        def forward(self, x):
            h = self.a(x)
            return (h @ h.T).view(x.shape[0] * x.shape[0]).pow(2).mean()

    captured = capture(Toy(Pairs, vectors))
    assert captured.exact
    assert {node.spec.shape for node in captured.graph.nodes if node.target == "view"} == {("s0*s0",)}


def test_pitfall_04_arithmetic_that_is_no_line_is_followed_with_a_symbolic_size():
    class Halves(Base):
        def forward(self, x):
            half = x.shape[0] // 2
            return self.a(x)[:half].pow(2).mean() / (1 + 1 / x.shape[0])

    captured = capture(Toy(Halves, vectors))
    assert captured.exact
    assert "symbolic" in captured.method


def test_pitfall_04_what_a_model_does_from_some_batch_size_on_is_noticed():
    class Threshold(Base):
        def forward(self, x):
            h = self.a(x)
            if x.shape[0] > 64:
                h = h * 2
            return h.pow(2).mean()

    captured = capture(Toy(Threshold, vectors))
    assert any("if x.shape[0] > 64" in note for note in captured.notes)
    with pytest.raises(RunError, match="takes another branch of the model"):
        replay(captured.module, {"x": torch.ones(100, 4)}, (0, 0, 0))


def test_pitfall_05_padding_does_not_fix_the_batch_size():
    class Padding(Base):
        def forward(self, x):
            h = F.pad(self.a(x), (1, 1))
            return torch.baddbmm(h[:, None], h[:, None], torch.eye(6).expand(x.shape[0], 6, 6)).pow(2).mean()

    assert capture(Toy(Padding, vectors)).exact


def test_pitfall_05_the_batch_is_no_size_of_the_model():
    class Five(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(5, 6)

        def forward(self, x):
            return self.a(x).flatten().view(-1, 6).pow(2).mean()

    captured = capture(Toy(Five, lambda n, g: {"x": torch.randn(n, 5, generator=g)}))
    assert captured.graph.symbols[0].hint == 7
    assert captured.graph.inputs[0].spec.shape == ("s0", 5)


def test_pitfall_07_tensors_that_a_helper_has_cached_are_constants_by_value():
    table = torch.arange(4.0)

    class Cached(Base):
        def forward(self, x):
            return (self.a(x) * table).pow(2).mean()

    captured = capture(Toy(Cached, vectors))
    assert [value.tolist() for value in captured.constants.values()] == [[0.0, 1.0, 2.0, 3.0]]
    assert all(type(value) is torch.Tensor for value in captured.constants.values())


def test_pitfall_08_following_a_model_has_no_side_effects():
    work = workload("batch norm")
    model = work.build_model()
    capture(work, model=model)
    assert int(model.norm.num_batches_tracked) == 0
    assert model.norm.running_mean.abs().max() == 0


def test_pitfall_09_the_users_own_backward_is_kept():
    captured = capture(workload("custom function"))
    assert captured.exact
    assert "support.trace_cases.StraightThrough.apply" in [node.target for node in captured.graph.nodes]


def test_pitfall_10_no_cut_lies_before_a_change_in_place():
    graph = capture(workload("batch norm")).graph
    act = next(node for node in graph.nodes if node.target == "act")
    assert act.mutates == ("norm",)
    assert graph.position[act.name] not in Cuts(graph).legal


def test_pitfall_11_a_view_keeps_its_base_until_the_last_change():
    graph = capture(workload("in place")).graph
    first = min(graph.position[node.name] for node in graph.nodes if node.mutates)
    last = max(graph.position[node.name] for node in graph.nodes if node.mutates and not node.input_only)
    assert not [position for position in Cuts(graph).legal if first <= position <= last]


def test_pitfall_11_no_cut_parts_a_base_from_a_view_that_is_changed_later():
    class Late(Base):
        def forward(self, x):
            h = self.a(x) * 2
            left = h[:, :2]
            other = torch.tanh(self.a(x))
            left.mul_(3)
            return (h + other).pow(2).mean()

    graph = capture(Toy(Late, vectors)).graph
    view = next(node for node in graph.nodes if node.name == "left")
    assert view.storage == "h"
    change = next(graph.position[node.name] for node in graph.nodes if node.mutates)
    assert not [cut for cut in Cuts(graph).legal if graph.position["h"] < cut <= change]


def test_pitfall_12_every_name_of_a_tied_parameter_is_known():
    graph = capture(workload("tied")).graph
    assert {**graph.aliases} == {"head.weight": "embed.weight"}
    assert [n.name for n in graph.nodes if "embed.weight" in n.parameters] == ["h", "head"]


def test_pitfall_13_what_is_not_saved_is_not_saved_by_the_module():
    assert list(capture(workload("rotary")).module.state_dict()) == ["embed.weight", "out.weight", "out.bias"]


def test_pitfall_14_masks_come_from_the_position_of_the_draw():
    work = workload("checkpoint")
    captured = capture(work)
    assert captured.exact  # the recomputation of checkpoint() would have drawn others
    leaves = work.leaves(work.example_item(5))
    first, again, other = (replay(captured.module, leaves, (0, 0, j))[0].item() for j in (0, 0, 1))
    assert first == again
    assert first != other


def test_pitfall_16_batch_statistics_are_said():
    notes = capture(Toy(workload("batch norm")._build, images)).notes
    assert any("batch statistics (norm and 1 more)" in note for note in notes)


def test_a_tensor_passed_twice_is_two_inputs():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x, y):
            return (self.a(x) - y).pow(2).mean()

    def batch(n, generator):
        x = torch.randn(n, 4, generator=generator)
        return {"x": x, "y": x}

    graph = capture(Toy(Both, batch)).graph
    assert [node.inputs for node in graph.nodes][:2] == [("x",), ("a", "y")]


def test_pitfall_21_a_checkpoint_of_the_users_is_said_to_be_flattened():
    for name in ("checkpoint", "reentrant checkpoint"):
        assert any("checkpoint() in the model is flattened" in note for note in capture(workload(name)).notes)


def test_pitfall_22_a_transformer_of_torch_is_looked_into():
    graph = capture(workload("nn.Transformer")).graph
    assert len([node for node in graph.nodes if node.target.endswith("linear1")]) == 2
    assert not [node for node in graph.nodes if node.target == "model"]


def test_pitfall_22_a_container_of_torch_is_looked_into():
    work = Toy(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))), vectors)
    work.loss = lambda model, item: (model(item["x"]).pow(2).mean(), None)
    assert [node.target for node in capture(work).graph.nodes][:3] == ["0", "1.0", "1.1"]


@functools.lru_cache
def memoized_table(width):
    return torch.arange(float(width))


kept_tables = {}


class Tables:
    def __init__(self):
        self.table = None

    def get(self):
        if self.table is None:
            self.table = torch.ones(4) * 3
        return self.table


class Caching(Base):
    def __init__(self):
        super().__init__()
        self.tables = Tables()

    def forward(self, x):
        if "scale" not in kept_tables:
            kept_tables["scale"] = torch.full((4,), 2.0)
        return (self.a(x) * memoized_table(4) * kept_tables["scale"] * self.tables.get()).pow(2).mean()


def test_pitfall_07_what_helpers_keep_is_not_left_fake():
    work = Toy(Caching, vectors)
    model = work.build_model()
    assert capture(work, model=model).exact
    assert model.tables.table is None or type(model.tables.table) is torch.Tensor
    assert type(memoized_table(4)) is torch.Tensor
    assert all(type(value) is torch.Tensor for value in kept_tables.values())
    assert capture(work, model=model).exact  # now everything is cached


def test_a_distribution_does_not_check_its_arguments_while_it_is_followed():
    class Sampling(Base):
        def forward(self, x):
            h = self.a(x)
            return torch.distributions.Normal(h, h.exp()).rsample().pow(2).mean()

    captured = capture(Toy(Sampling, vectors))
    assert captured.exact
    assert sum(node.num_random for node in captured.graph.nodes) == 1


def test_masks_made_in_inference_mode_are_followed():
    class Inference(Base):
        def forward(self, x):
            with torch.inference_mode():
                mask = (x > 0).float()
            return (self.a(x) * mask.clone()).pow(2).mean()

    assert capture(Toy(Inference, vectors)).exact


def test_an_embedding_that_renormalises_itself_is_refused():
    model = nn.Sequential(nn.Embedding(20, 4, max_norm=1.0))
    work = Toy(lambda: model, lambda n, g: {"input": tokens(n, g)["ids"]}, loss=lambda out, item: out.mean())
    with pytest.raises(TraceError, match="0 changes its weight in the forward"):
        capture(work)
