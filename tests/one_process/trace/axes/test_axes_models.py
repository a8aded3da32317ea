"""At least 80 % of the parameters of known transformers can be sharded, and the shards compute what the model does."""

import dataclasses
import functools

import pytest
import torch
from support.models.trace import Toy
from support.models.transformers import MODELS, text, toy_of

from autopipe.ir.profile import WorkloadSpec
from autopipe.ir.teams.axis_sets import choose, coverage, num_bytes
from autopipe.trace import capture
from autopipe.trace.axes import find_axes
from autopipe.trace.axes.verified import verified
from autopipe.workload import Workload

pytest.importorskip("transformers")


def assert_sharded(captured, leaves, team=2):
    """Assert that the axes of a team cover 80 % of the bytes of the parameters, and hold."""
    axes = choose(captured.graph, find_axes(captured).axes, team)
    for one in axes:
        assert not any(one.excludes(other) for other in axes if other is not one)
    names = {place.name for axis in axes for place in axis.parameters}
    assert num_bytes(captured.graph, names) >= 0.8 * num_bytes(captured.graph, captured.graph.parameters)
    assert verified(captured, axes, leaves, team).notes == ()
    return axes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("default")
def test_a_model_of_transformers_is_sharded(name):
    toy = toy_of(name)
    captured = capture(toy, verify=False, lengths=False)
    axes = assert_sharded(captured, toy.leaves(toy.example_item(3)))
    assert any(axis.draws for axis in axes) or name in ("Qwen3ForCausalLM", "Phi3ForCausalLM")
    partial = {parameter for axis in axes for parameter in axis.partial}
    assert bool(partial) == (name == "Qwen3ForCausalLM")


@pytest.mark.filterwarnings("default")
def test_the_default_gpt2_is_sharded_with_its_50257_words():
    import transformers

    toy = Toy(lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()), functools.partial(text, words=50257))
    with torch.device("meta"):
        model = toy.build_model().train()
    captured = capture(toy, verify=False, lengths=False, model=model)
    graph = dataclasses.replace(captured.graph, axes=find_axes(captured).axes)
    for team in (2, 3, 4):
        shard = coverage(graph, team)
        assert "transformer.wte/50257" in [axis.name for axis in shard.axes]
        assert shard.share > 0.999


def test_the_sample_is_sharded_at_two_and_four_with_dropout():
    spec = WorkloadSpec("sample_models/gpt.py", arguments={"dropout": 0.1, "blocks": 2}, hooks={}, inputs=(), seed=0)
    workload = Workload.from_spec(spec)
    captured = capture(workload, verify=False, lengths=False)
    leaves = workload.leaves(workload.example_item(2))
    assert_sharded(captured, leaves)
    axes = assert_sharded(captured, leaves, team=4)
    assert [axis.name for axis in axes if axis.draws] == ["blocks.0.attention/4", "blocks.1.attention/4"]
