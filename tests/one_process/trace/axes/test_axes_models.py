"""At least 80 % of the parameters of known transformers can be sharded, and the shards compute what the model does."""

import pytest
import torch
from support.models.trace import Toy

from autopipe.ir.axis_sets import choose, num_bytes
from autopipe.ir.profile import WorkloadSpec
from autopipe.trace import capture
from autopipe.trace.axes import find_axes
from autopipe.trace.axes.verified import verified
from autopipe.workload import Workload

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip


def text(n, generator):
    ids = torch.randint(1, 96, (n, 16), generator=generator)
    return {"input_ids": ids, "labels": ids}


def pictures(n, generator):
    labels = torch.randint(0, 2, (n,), generator=generator)
    return {"pixel_values": torch.randn(n, 3, 16, 16, generator=generator), "labels": labels}


MODELS = {
    "GPT2LMHeadModel": (
        "GPT2Config", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, text,
    ),
    "LlamaForCausalLM": ("LlamaConfig", {**SMALL, "num_key_value_heads": 2, "attention_dropout": 0.1}, text),
    "Qwen3ForCausalLM": ("Qwen3Config", {**SMALL, "num_key_value_heads": 2, "head_dim": 8}, text),
    "Phi3ForCausalLM": ("Phi3Config", {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0}, text),
    "BertForMaskedLM": ("BertConfig", SMALL, text),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0},
        text,
    ),
    "ViTForImageClassification": (
        "ViTConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
         "image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
        pictures,
    ),
    "MixtralForCausalLM": (
        "MixtralConfig",
        {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "attention_dropout": 0.1}, text,
    ),
}  # fmt: skip


def toy_of(name):
    config, options, batch = MODELS[name]
    return Toy(lambda: getattr(transformers, name)(getattr(transformers, config)(**options)), batch)


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


def test_the_sample_is_sharded_at_two_and_four_with_dropout():
    spec = WorkloadSpec("sample_models/gpt.py", arguments={"dropout": 0.1, "blocks": 2}, hooks={}, inputs=(), seed=0)
    workload = Workload.from_spec(spec)
    captured = capture(workload, verify=False, lengths=False)
    leaves = workload.leaves(workload.example_item(2))
    assert_sharded(captured, leaves)
    axes = assert_sharded(captured, leaves, team=4)
    assert [axis.name for axis in axes if axis.draws] == ["blocks.0.attention/4", "blocks.1.attention/4"]
