"""Which parameters of small models can be sharded, and which cannot. What is found holds on numbers."""

import dataclasses
import importlib

import pytest
import torch
from support.models.axes import (
    Attention,
    AtZero,
    Body,
    Double,
    Grouped,
    GroupedSplit,
    HeadsFirst,
    Interleaved,
    Merged,
    Module,
    Normed,
    Plain,
    Separate,
    Sinks,
    Vocabulary,
    Wide,
    workload,
)
from torch import nn
from torch.nn import functional

from autopipe.ir.teams.axes import LOG_SOFTMAX, LOOKED_UP, MULTIHEAD, PICKED
from autopipe.ir.teams.axis_sets import choose
from autopipe.trace import capture
from autopipe.trace.axes import find_axes
from autopipe.trace.axes.verified import Verified, choose_verified, verified
from autopipe.trace.teams import of_team


def sharded(model, team=2):
    """Return the chosen axes of a model, verified; and why its other parameters are whole."""
    toy = workload(model)
    captured = capture(toy, verify=False, lengths=False)
    model_axes = find_axes(captured)
    chosen = choose(captured.graph, model_axes.axes, team)
    leaves = toy.leaves(toy.example_item(3))
    assert verified(captured, chosen, leaves, team).notes == ()
    return chosen, model_axes.whole


def parameters(axes):
    return {place.name for axis in axes for place in axis.parameters}


@pytest.mark.parametrize(
    "inner",
    [
        lambda: Attention(0.3),
        Grouped,
        lambda: GroupedSplit(0.3),
        lambda: Plain(0.3),
        Merged,
        Sinks,
        Interleaved,
        Wide,
        lambda: Wide(gated=True),
        lambda: Wide(nn.Dropout(0.4)),
        lambda: Wide(lambda x: x.mul_(2.0)),
        lambda: Wide(lambda x: x * x.new_full((12,), 0.5)),
    ],
)
def test_both_sides_of_a_block_are_sharded(inner):
    axes, _ = sharded(lambda: Body(inner()))
    names = {name for name, _ in Body(inner()).inner.named_parameters()} - {"out.bias"}
    assert parameters(axes) == {f"inner.{name}" for name in names}


@pytest.mark.parametrize("options", [{}, {"batch_first": False}, {"width": 8}])
def test_the_heads_of_torchs_own_module_are_sharded(options):
    (axis,), _ = sharded(lambda: Body(Module(**options)))
    names = {name for name, _ in Module(**options).attention.named_parameters()} - {"out_proj.bias"}
    assert parameters([axis]) == {f"inner.attention.{name}" for name in names}
    assert [entry.how for entry in axis.sums] == [MULTIHEAD]
    assert len(axis.draws) == 1


def test_a_module_whose_attention_weights_are_read_stays_whole():
    axes, whole = sharded(lambda: Body(Module(weights=True)))
    assert axes == ()
    assert whole["inner.attention.in_proj_weight"] == "read by MultiheadAttention: its weights are read"


def test_a_fused_projection_of_grouped_heads_has_three_segments():
    (axis,), _ = sharded(lambda: Body(Grouped()))
    place = next(place for place in axis.parameters if place.name == "inner.qkv.weight")
    assert [(segment.length, segment.inner) for segment in place.segments] == [(32, 16), (8, 4), (8, 4)]
    assert axis.size == 2


def test_more_members_than_heads_of_keys_share_out_the_groups_of_the_queries():
    (axis,), _ = sharded(lambda: Body(Separate()), team=4)
    assert parameters([axis]) == {"inner.q.weight", "inner.q.bias", "inner.out.weight"}
    assert axis.size == 4
    (axis,), _ = sharded(lambda: Body(Separate()), team=2)
    assert parameters([axis]) == {
        "inner.q.weight",
        "inner.q.bias",
        "inner.kv.weight",
        "inner.kv.bias",
        "inner.out.weight",
    }


def test_whole_parameters_that_are_read_with_sharded_values_are_partial():
    (axis,), _ = sharded(lambda: Body(Normed()))
    assert {*axis.partial} == {"inner.q_norm.weight", "inner.q_norm.bias", "inner.k_norm.weight"}


def test_a_buffer_that_carries_heads_is_cut_with_them():
    (axis,), _ = sharded(lambda: Body(Plain()))
    assert [place.name for place in axis.state] == ["inner.slopes"]


def test_a_tied_vocabulary_is_one_axis_of_both_uses():
    (axis,), _ = sharded(Vocabulary)
    assert parameters([axis]) == {"table.weight", "head.bias"}
    assert [entry.how for entry in axis.sums] == [LOOKED_UP, LOG_SOFTMAX, PICKED]


@pytest.mark.parametrize(("words", "team"), [(9, 2), (8, 3), (13, 4), (11, 3)])
def test_a_vocabulary_that_the_team_does_not_divide_is_padded(words, team):
    (axis,), _ = sharded(lambda: Vocabulary(words=words), team)
    assert parameters([axis]) == {"table.weight", "head.bias"}
    assert axis.size == words


@pytest.mark.parametrize(
    "read",
    [
        lambda logits: logits.softmax(-1).square().sum(),
        lambda logits: logits.logsumexp(-1).mean(),
        lambda logits: logits.argmax(-1).float().mean(),
        lambda logits: logits.sum(),
        lambda logits: logits[..., :4].square().mean(),
        lambda logits: functional.dropout(logits, 0.1).sum(),
    ],
)
def test_a_vocabulary_whose_logits_are_read_otherwise_is_not_padded(read):
    class Reading(Body):
        def forward(self, x, labels):
            logits = self.head(self.last(x + self.inner(self.first(x)))).flatten(0, 1)
            return functional.cross_entropy(logits, labels.flatten()) + 0.1 * read(logits)

    axes, _ = sharded(lambda: Reading(Wide(), classes=9))
    assert parameters(axes) == {"inner.up.weight", "inner.up.bias", "inner.down.weight"}


def test_a_vocabulary_whose_padding_would_have_no_gradient_is_not_sharded():
    class Scaled(Body):
        def __init__(self):
            super().__init__(nn.Identity(), classes=9)
            self.temperature = nn.Parameter(torch.ones(9))

        def forward(self, x, labels):
            return functional.cross_entropy((self.head(x) / self.temperature).flatten(0, 1), labels.flatten())

    toy = workload(Scaled)
    captured = capture(toy, verify=False, lengths=False)
    axes, leaves = find_axes(captured).axes, toy.leaves(toy.example_item(3))
    assert [axis.size for axis in choose_verified(captured, axes, leaves, 3).axes] == [9]
    outcome = choose_verified(captured, axes, leaves, 2)
    assert outcome.axes == ()
    assert outcome.notes[0].startswith("axis model/9 is not sharded: the gradient of ")


@pytest.mark.parametrize(
    ("between", "why"),
    [
        (lambda x: Double.apply(x), "read by"),  # an unknown call
        (lambda x: x.cumsum_(-1), "read by cumsum_"),  # in place, and not elementwise
        (lambda x: x.index_fill_(-1, torch.tensor([1]), 0.0), "read by"),
        (lambda x: x.softmax(-1), "softmax over it"),
        (lambda x: x.flip(-1), "read by flip"),
        (lambda x: x.unflatten(-1, (3, 4)).mean(-1).repeat_interleave(4, -1).mul(x.unflatten(-1, (4, 3)).sum(-1)
            .repeat_interleave(3, -1)), ""),
        (lambda x: x.view(*x.shape[:-1], 3, 4).add(x.view(*x.shape[:-1], 4, 3).transpose(-1, -2)).flatten(-2), ""),
        (lambda x: x * torch.linspace(0, 1, 12), "made by linspace"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_stays_whole(between, why):
    axes, whole = sharded(lambda: Body(Wide(between)))
    assert "inner.up.weight" not in parameters(axes)
    assert why in whole["inner.up.weight"]


def test_an_assignment_to_a_part_stays_whole():
    def assigned(x):
        y = x.clone()
        y[..., 2] = 0.0
        return y

    _, whole = sharded(lambda: Body(Wide(assigned)))
    assert "setitem" in whole["inner.up.weight"]


def test_heads_outside_of_the_batch_stay_whole():
    # where a member's part begins would depend on the size of the batch
    axes, whole = sharded(lambda: Body(HeadsFirst()))
    assert axes == ()
    assert whole["inner.qkv.bias"] == "a part of a dimension only"


def test_a_size_that_the_team_does_not_divide_stays_whole():
    axes, _ = sharded(lambda: Body(Wide(hidden=9)))
    assert axes == ()
    axes, _ = sharded(lambda: Body(Wide(hidden=9)), team=3)
    assert [axis.size for axis in axes] == [9]


def test_a_model_without_two_layers_in_sequence_has_nothing_to_shard():
    axes, whole = sharded(lambda: Body(nn.Identity()))
    assert axes == ()
    toy = workload(lambda: Body(nn.Identity()))
    captured = capture(toy, verify=False, lengths=False)
    outcome = choose_verified(captured, find_axes(captured).axes, toy.leaves(toy.example_item(3)), 2)
    assert outcome == Verified((), ("no parameter can be sharded over 2 processes",))
    assert of_team(captured, outcome.axes, 2).shards == {}
    assert whole["head.weight"] == "read by cross_entropy: it has label smoothing or weights"


def wrong(axis, change):
    """Return an axis with one error."""
    return dataclasses.replace(axis, **change(axis))


@pytest.mark.parametrize(
    "change",
    [
        lambda axis: {"entries": ()},
        lambda axis: {"rewrites": ()},
        lambda axis: {"sums": ()},
        lambda axis: {"partial": ()},
        lambda axis: {"parameters": axis.parameters[1:]},
        lambda axis: {"draws": ()},
    ],
)
def test_an_axis_that_does_not_hold_is_dropped_with_a_note(change):
    class Inner(Normed):
        def attend(self, q, k, v):
            return Plain.attend(self, q, k, v)

    def model():
        inner = Inner()
        inner.dropout = 0.3
        inner.register_buffer("slopes", torch.ones(4))
        return Body(nn.Sequential(inner, Wide()))

    toy = workload(model)
    captured = capture(toy, verify=False, lengths=False)
    right = choose(captured.graph, find_axes(captured).axes, 2)
    assert [axis.name for axis in right] == ["inner.0/4", "inner.1/12"]
    outcome = verified(captured, [wrong(right[0], change), right[1]], toy.leaves(toy.example_item(3)), 2)
    assert outcome.axes == (right[1],)
    assert len(outcome.notes) == 1
    assert outcome.notes[0].startswith("axis inner.0/4 is not sharded: ")


def test_where_an_axis_does_not_hold_one_that_it_excluded_is_chosen():
    toy = workload(lambda: Body(Separate()))
    captured = capture(toy, verify=False, lengths=False)
    axes = find_axes(captured).axes
    (best,) = choose(captured.graph, axes, 2)
    assert best.size == 2
    broken = [dataclasses.replace(axis, entries=()) if axis is best else axis for axis in axes]
    outcome = choose_verified(captured, broken, toy.leaves(toy.example_item(3)), 2)
    assert [axis.size for axis in outcome.axes] == [4]
    assert [note.partition(":")[0] for note in outcome.notes] == ["axis inner/2 is not sharded"]


def test_axes_that_hold_alone_and_not_together_are_dropped():
    toy = workload(lambda: Body(Separate()))
    captured = capture(toy, verify=False, lengths=False)
    both = [axis for axis in find_axes(captured).axes if axis.size in (2, 4) and "inner.q.weight" in parameters([axis])]
    leaves = toy.leaves(toy.example_item(3))
    assert [verified(captured, [axis], leaves, 2).notes for axis in both] == [(), ()]
    outcome = verified(captured, both, leaves, 2)
    assert outcome.axes == ()
    assert outcome.notes[0].startswith("no axis is sharded: together they do not hold: ")


def test_a_model_without_memory_is_not_verified():
    toy = workload(lambda: Body(Wide()))
    with torch.device("meta"):
        model = Body(Wide()).train()
    captured = capture(toy, verify=False, lengths=False, model=model)
    outcome = choose_verified(captured, find_axes(captured).axes, {}, 2)
    assert [axis.name for axis in outcome.axes] == ["inner/12"]
    assert outcome.notes == ("axes are not verified: the model is on the meta device",)


def test_verification_leaves_the_model_as_it_was():
    toy = workload(lambda: Body(Plain(0.2)))
    captured = capture(toy, verify=False, lengths=False)
    tensors = [*captured.module.parameters(), *captured.module.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    leaves = toy.leaves(toy.example_item(3))
    batch = {name: leaf.clone() for name, leaf in leaves.items()}
    state = torch.get_rng_state()
    assert verified(captured, choose(captured.graph, find_axes(captured).axes, 2), leaves, 2).axes
    assert all(map(torch.equal, before, tensors))
    assert all(tensor.grad is None for tensor in tensors)
    assert all(torch.equal(batch[name], leaf) for name, leaf in leaves.items())
    assert state.shape == torch.get_rng_state().shape


def test_the_graph_does_not_change_when_its_sizes_depend_on_the_data():
    class Selecting(Body):
        def forward(self, x, labels):
            chosen = self.inner(x)[labels > 2].pow(2)
            scale = 1.0 if chosen.shape[0] > 2 and labels.max() < 100 else 0.0
            return super().forward(x, labels) + scale * chosen.sum() / chosen.shape[0]

    toy = workload(lambda: Selecting(Attention()))
    captured = capture(toy, verify=False, lengths=False, allow_data_dependent=True)
    assert captured.method.endswith("batch size symbolic, data-dependent decisions kept")
    before = [node.name for node in captured.module.graph.nodes]
    axes = choose(captured.graph, find_axes(captured).axes, 2)
    assert [node.name for node in captured.module.graph.nodes] == before
    assert parameters(axes) == {"inner.qkv.weight", "inner.qkv.bias", "inner.out.weight"}
    assert verified(captured, axes, toy.leaves(toy.example_item(3)), 2).notes == ()


def test_a_product_with_a_transposed_weight_is_sharded():
    class Transposed(Wide):
        def forward(self, x):
            return self.between(x @ self.up.weight.T + self.up.bias) @ self.down.weight.mT

    axes, _ = sharded(lambda: Body(Transposed()))
    assert parameters(axes) == {"inner.up.weight", "inner.up.bias", "inner.down.weight"}


def test_a_gradient_that_jumps_at_zero_is_not_a_difference(monkeypatch):
    (axis,), _ = sharded(lambda: Body(AtZero()))
    assert parameters([axis]) == {"inner.wide.up.weight", "inner.wide.up.bias", "inner.wide.down.weight"}
    monkeypatch.setattr(importlib.import_module("autopipe.trace.axes.verified"), "_MARGIN", 0.0)
    with pytest.raises(AssertionError, match="differs by"):
        sharded(lambda: Body(AtZero()))


def test_looking_for_jumps_does_not_change_the_model():
    toy = workload(lambda: Body(AtZero()))
    captured = capture(toy, verify=False, lengths=False)
    before = {name: tensor.clone() for name, tensor in captured.module.state_dict().items()}
    axes = choose(captured.graph, find_axes(captured).axes, 2)
    leaves = toy.leaves(toy.example_item(3))
    assert verified(captured, axes, leaves, 2).axes == axes
    broken = [dataclasses.replace(axis, entries=()) for axis in axes]
    assert verified(captured, broken, leaves, 2).axes == ()
    assert all(torch.equal(tensor, before[name]) for name, tensor in captured.module.state_dict().items())
    assert all(parameter.grad is None for parameter in captured.module.parameters())
