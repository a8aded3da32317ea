import re
from inspect import getsourcelines

import pytest
import torch
import torch.nn.functional as F
from support.models.trace import Plain, Toy, images, tokens, vectors, workload
from torch import nn

from autopipe.ir.cuts import Cuts
from autopipe.trace import capture


def graph_of(name):
    return capture(workload(name), verify=False).graph


def graph_of_model(build, batch=vectors, **options):
    return capture(Toy(build, batch), verify=False, **options).graph


def by_name(graph):
    return {node.name: node for node in graph.nodes}


def test_a_plain_model_is_the_calls_its_forward_makes():
    graph = graph_of("plain")
    assert [(n.name, n.kind, n.target, n.inputs) for n in graph.nodes] == [
        ("first", "call_module", "first", ("x",)),
        ("hidden", "call_method", "relu", ("first",)),
        ("hidden_2", "call_module", "drop", ("hidden",)),
        ("second", "call_module", "second", ("hidden_2",)),
        ("sub", "call_function", "operator.sub", ("second", "x")),
        ("pow_", "call_function", "operator.pow", ("sub",)),
        ("mean", "call_method", "mean", ("pow_",)),
    ]
    assert graph.outputs == ("mean",)
    nodes = by_name(graph)
    assert nodes["first"].parameters == ("first.weight", "first.bias")
    assert str(nodes["first"].spec) == "float32[s0, 8]"
    assert nodes["first"].spec.requires_grad
    assert (nodes["hidden_2"].num_random, nodes["hidden_2"].random_position) == (1, 0)
    assert nodes["first"].source.endswith(f"trace.py:{getsourcelines(Plain.forward)[1] + 1}")
    assert nodes["hidden"].module_type == "Plain"
    assert nodes["first"].module_type == "Linear"


def test_a_tied_parameter_has_one_name():
    graph = graph_of("tied")
    assert graph.aliases == {"head.weight": "embed.weight"}
    assert "head.weight" not in graph.parameters
    assert by_name(graph)["head"].parameters == ("embed.weight",)


def test_the_batch_size_is_an_expression_of_the_input():
    graph = graph_of("tied")
    assert [(s.name, s.input, s.dimension) for s in graph.symbols] == [("s0", "ids", 0), ("s1", "ids", 1)]
    assert by_name(graph)["flatten"].spec.shape == ("s0*s1", 20)


def test_an_input_that_is_not_batched_keeps_its_size():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 4)

        def forward(self, ids, positions, scale):
            return (self.embed(ids) * positions[:, None] * scale).pow(2).mean()

    def batch(n, generator):
        return {**tokens(n, generator), "positions": torch.arange(9.0), "scale": torch.tensor(2.0)}

    graph = graph_of_model(Positions, batch)
    assert [entry.spec.shape for entry in graph.inputs] == [("s0", "s1"), ("s1",), ()]


def test_tables_and_masks_depend_on_inputs_only():
    graph = graph_of("rotary")
    free = [node.target for node in graph.nodes if node.input_only]
    assert "cos" in free and "sin" in free
    assert "embed" not in free
    assert by_name(graph)["h_3"].context == "autocast(cpu, bfloat16)"
    assert next(node for node in graph.nodes if node.target == "cos").context == "no_grad"


def test_random_values_are_never_recomputed():
    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            noise = torch.randn_like(x)
            return (self.a(x) + noise + F.dropout(x, 0.5)).pow(2).mean()

    nodes = by_name(graph_of_model(Noise))
    assert not nodes["noise"].input_only
    assert [n.random_position for n in nodes.values() if n.num_random] == [0, 1]


def test_an_unused_random_draw_has_a_position():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            torch.rand(3)
            return F.dropout(self.a(x), 0.5).pow(2).mean()

    captured = capture(Toy(Unused, vectors))
    drawing = [node for node in captured.graph.nodes if node.num_random]
    assert [(node.target, node.random_position) for node in drawing] == [("torch.nn.functional.dropout", 1)]


def test_written_buffers_are_recorded():
    nodes = by_name(graph_of("batch norm"))
    expected = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert nodes["norm"].buffers == expected
    assert sorted(nodes["norm"].buffers_written) == sorted(expected)


def test_changes_in_place_are_recorded_with_their_storage():
    graph = graph_of("in place")
    nodes = by_name(graph)
    assert nodes["left"].storage == "h"
    assert nodes["mul"].mutates == ("left",)
    setitem = next(n for n in graph.nodes if n.target == "operator.setitem")
    assert setitem.mutates == ("h",)
    assert "mul" in setitem.after
    # the mask is changed by a constant only, so every stage can compute it
    masked = [n for n in graph.nodes if n.target == "operator.setitem"][1]
    assert masked.input_only
    assert nodes["h_2"].mutates == ("h",)
    cuts = Cuts(graph)
    place = graph.position
    assert not [p for p in cuts.legal if place["h"] < p <= place["h_2"]]


def test_a_mask_that_parameters_write_into_is_not_recomputed():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            table = torch.zeros_like(x)
            view = table[:, :2]
            table[:, 0] = self.a(x)[:, 0]
            return (view * self.a(x)[:, :2]).pow(2).mean()

    nodes = by_name(graph_of_model(Written))
    assert not nodes["table"].input_only
    assert not nodes["view"].input_only
    assert nodes["mul"].after == ("setitem",)


def test_a_batch_that_is_changed_in_place_is_cloned_first():
    class Masking(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            x[x < 0] = 0.0
            x.mul_(2)
            return self.a(x).pow(2).mean()

    captured = capture(Toy(Masking, vectors))
    first = captured.graph.nodes[0]
    assert (first.target, first.inputs) == ("clone", ("x",))
    assert all("x" not in node.mutates for node in captured.graph.nodes)
    assert captured.exact


def test_parts_of_a_tuple_stay_in_the_stage_of_the_call():
    graph = graph_of("experts")
    glued = [node for node in graph.nodes if node.glued]
    assert [node.inputs for node in glued] == [("topk",), ("topk",)]
    assert [node.name for node in glued] == ["weights", "chosen"]


def test_plain_tensors_are_constants_by_value():
    captured = capture(workload("plain tensors"))
    assert sorted(captured.constants) == ["constant_mask", "constant_scales_1"]
    assert captured.constants["constant_mask"].tolist() == [1.0, 0.0, 1.0, 1.0]
    assert {name for node in captured.graph.nodes for name in node.constants} == set(captured.constants)
    assert not {name for name, _ in captured.module.named_buffers()} & set(captured.constants)


@pytest.mark.parametrize("value", [0.5, 0.25])
def test_another_constant_gives_another_digest(value):
    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.a, self.scale = nn.Linear(4, 4), torch.tensor(scale)

        def forward(self, x):
            return (self.a(x) * self.scale).pow(2).mean()

    assert graph_of_model(lambda: Scaled(1.0)).digest != graph_of_model(lambda: Scaled(value)).digest


def test_the_rate_of_a_dropout_is_in_the_digest():
    def build(rate):
        return lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate))

    def digest(rate):
        work = Toy(build(rate), lambda n, g: {"input": vectors(n, g)["x"]}, loss=lambda out, item: out.pow(2).mean())
        return capture(work, verify=False).graph.digest

    assert digest(0.1) != digest(0.2)


def test_buffers_that_are_not_persistent_stay_so():
    module = capture(workload("rotary"), verify=False).module
    assert "frequencies" in dict(module.named_buffers())
    assert "frequencies" not in module.state_dict()


def test_the_module_holds_the_parameter_objects_of_the_model():
    work = workload("tied")
    model = work.build_model()
    module = capture(work, model=model, verify=False).module
    ours, theirs = dict(module.named_parameters()), dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in ours)


def test_a_loss_module_is_recorded_as_its_calls():
    criterion = nn.CrossEntropyLoss(weight=torch.ones(4), label_smoothing=0.1)
    work = Toy(
        lambda: nn.Sequential(nn.Linear(4, 4)),
        lambda n, g: {"input": vectors(n, g)["x"]},
        loss=lambda out, item: criterion(out, torch.zeros(out.shape[0], dtype=torch.long)),
    )
    captured = capture(work)
    assert captured.graph.nodes[-1].target == "torch.nn.functional.cross_entropy"
    assert captured.exact
    assert len(captured.constants) == 1


def test_arguments_for_evaluation_are_kept_if_they_differ():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x):
            return F.dropout(self.drop(self.a(x)), 0.5, training=self.training).pow(2).mean()

    work = Toy(Functional, vectors)
    model = work.build_model()
    captured = capture(work, model=model)
    assert list(captured.evaluation) == ["dropout"]
    args, kwargs = captured.evaluation["dropout"]
    assert kwargs["training"] is False
    assert args[0].name == "drop"
    assert captured.evaluation_note == ""
    assert all(module.training for module in model.modules())


def test_a_different_path_in_evaluation_is_noted():
    class DropPath(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x)
            if self.training:
                h = h * torch.empty(h.shape[0], 1).bernoulli_(0.5)
            return h.pow(2).mean()

    captured = capture(Toy(DropPath, vectors))
    assert captured.exact
    assert captured.evaluation == {}
    assert captured.evaluation_note.startswith("eval mode traces differently: another call at ")


class OwnNorm(nn.Module):
    """Counts its batches as timm's batch norm does, so that it makes other calls in evaluation."""

    def __init__(self, note):
        super().__init__()
        self.note = note
        self.register_buffer("count", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.note(self.training)
        if self.training:
            self.count.add_(1)
        return (x - x.mean(1, keepdim=True)) * self.scale


def test_an_evaluation_pass_stops_at_the_first_different_call(tmp_path):
    passes = tmp_path / "passes"  # a list or a stream would be restored between the runs

    def note(training):
        with passes.open("a") as log:
            log.write("training " if training else "evaluation ")

    work = Toy(lambda: nn.Sequential(*(OwnNorm(note) for _ in range(40))), lambda n, g: {"input": vectors(n, g)["x"]})
    work._loss = lambda output, item: output.pow(2).mean()
    captured = capture(work, verify=False)
    assert re.match(r"eval mode traces differently: another call at \S*test_graph\.py:\d+$", captured.evaluation_note)
    assert passes.read_text().count("training") == 80
    assert 0 < passes.read_text().count("evaluation") < 20


class Telling(nn.Module):
    """Computes different unused values in training and in evaluation."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(12))

    def forward(self, x):
        for layer, scale in zip(self.layers, self.scales, strict=True):
            for _ in range(30 if self.training else 4):
                x.exp() if self.training else x.log()
            x = F.dropout(layer(x) * scale, 0.5, training=self.training)
        return x.pow(2).mean()


def test_unused_values_of_one_mode_are_not_a_different_path():
    captured = capture(Toy(Telling, vectors), verify=False)
    assert captured.evaluation_note == ""
    assert len(captured.evaluation) == 12


def test_modules_that_handle_their_mode_need_no_second_pass():
    captured = capture(Toy(workload("batch norm")._build, images), verify=False)
    assert captured.evaluation == {}
    assert captured.evaluation_note == ""


def test_unused_calls_are_removed():
    class Wasteful(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            self.b(x).exp()
            return self.a(x).pow(2).mean()

    assert "b" not in by_name(graph_of_model(Wasteful))


def test_frozen_and_unused_parameters_are_in_the_graph():
    graph = graph_of("frozen")
    assert not graph.parameters["base.weight"].requires_grad
    assert graph.parameters["down.weight"].requires_grad
    assert "unused" in graph.parameters
    assert not any("unused" in node.parameters for node in graph.nodes)
