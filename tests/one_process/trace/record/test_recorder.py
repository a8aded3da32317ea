"""What the recorder records: modules, tied parameters, random draws, checkpoints, views of the batch."""

import pytest
import torch
from support.chain import in_stages
from support.models.trace import Base, Toy, tokens, vectors, workload
from torch import nn

from autopipe.errors import TraceError
from autopipe.trace import capture, replay


def test_capturing_a_model_has_no_side_effects():
    work = workload("batch norm")
    model = work.build_model()
    capture(work, model=model)
    assert int(model.norm.num_batches_tracked) == 0
    assert model.norm.running_mean.abs().max() == 0


def test_a_custom_backward_is_recorded_as_one_call():
    captured = capture(workload("custom function"))
    assert captured.exact
    assert "support.models.trace.StraightThrough.apply" in [node.target for node in captured.graph.nodes]


def test_every_name_of_a_tied_parameter_is_recorded():
    graph = capture(workload("tied")).graph
    assert {**graph.aliases} == {"head.weight": "embed.weight"}
    assert [n.name for n in graph.nodes if "embed.weight" in n.parameters] == ["h", "head"]


def test_buffers_that_are_not_persistent_are_not_in_the_state_dict():
    assert list(capture(workload("rotary")).module.state_dict()) == ["embed.weight", "out.weight", "out.bias"]


def test_random_masks_depend_on_the_position_of_the_draw():
    work = workload("checkpoint")
    captured = capture(work)
    assert captured.exact  # the recomputation of checkpoint() would have drawn others
    leaves = work.leaves(work.example_item(5))
    first, again, other = (replay(captured.module, leaves, (0, 0, j))[0].item() for j in (0, 0, 1))
    assert first == again
    assert first != other


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


def test_the_calls_in_checkpoint_are_one_recompute_unit():
    for name in ("checkpoint", "reentrant checkpoint"):
        graph = capture(workload(name)).graph
        inside = [node.name for node in graph.nodes if node.checkpoint]
        assert {node.checkpoint for node in graph.nodes} == {0, 1}
        assert inside == [node.name for node in graph.nodes][graph.position[inside[0]] :][: len(inside)]


def test_the_layers_of_torchs_transformer_are_recorded_one_by_one():
    graph = capture(workload("nn.Transformer")).graph
    assert len([node for node in graph.nodes if node.target.endswith("linear1")]) == 2
    assert not [node for node in graph.nodes if node.target == "model"]


def test_the_layers_of_torchs_containers_are_recorded_one_by_one():
    work = Toy(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))), vectors)
    work.loss = lambda model, item: (model(item["x"]).pow(2).mean(), None)
    assert [node.target for node in capture(work).graph.nodes][:3] == ["0", "1.0", "1.1"]


def test_a_distribution_does_not_check_its_arguments_during_a_capture():
    class Sampling(Base):
        def forward(self, x):
            h = self.a(x)
            return torch.distributions.Normal(h, h.exp()).rsample().pow(2).mean()

    captured = capture(Toy(Sampling, vectors))
    assert captured.exact
    assert sum(node.num_random for node in captured.graph.nodes) == 1


def test_masks_computed_in_inference_mode_are_recorded():
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


class Converting(Base):
    """Converts a layer to the dtype that it has, in every forward, as some routers do."""

    to = torch.float32

    def forward(self, x):
        self.b = self.b.to(self.to)
        return self.b(self.a(x).to(self.to)).float().pow(2).mean()


class ConvertingToHalf(Converting):
    to = torch.bfloat16


def test_a_conversion_of_a_layer_to_its_own_dtype_changes_nothing(tmp_path):
    text, graph = in_stages(Toy(Converting, vectors), tmp_path, 3)
    assert "self.b(" in text
    assert list(graph.parameters) == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_a_conversion_of_a_layer_to_another_dtype_is_refused_with_both():
    with pytest.raises(TraceError, match=r"converts Linear: torch\.float32 to torch\.bfloat16") as caught:
        capture(Toy(ConvertingToHalf, vectors))
    assert "self.b = self.b.to(self.to)" in caught.value.where
    assert caught.value.remedy.startswith("do it where the model is built")


class Listed(Base):
    """Converts the batch to a list of samples and concatenates them, as models of images and text do."""

    def forward(self, x):
        rows = list(self.a(x))
        joined = torch.cat([row[None] for row in rows[:1]] + [torch.cat(rows)[None, :4]])
        stacked = torch.stack(list(self.b(x)), dim=0)
        stacked.mul_(2)
        return (torch.cat(rows).view(-1, 4) + stacked).pow(2).mean() + joined.sum()


def test_a_list_of_samples_that_is_concatenated_again_is_one_call_at_every_size(tmp_path):
    text, graph = in_stages(Toy(Listed, vectors), tmp_path, 3)
    assert len([node for node in graph.nodes if node.target == "flatten"]) == 2
    assert "torch.stack" not in text
