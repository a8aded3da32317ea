"""Models of the transformers library as they are used: labels in the batch, dict batches, no wrapper."""

import pytest
import torch
from support.models.trace import Toy

from autopipe.trace import capture

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def text(n, generator):
    ids = torch.randint(1, 99, (n, 16), generator=generator)
    mask = torch.ones(n, 16, dtype=torch.long)
    if n != 5:
        mask[:, 13:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def pictures(n, generator):
    return {
        "pixel_values": torch.randn(n, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 2, (n,), generator=generator),
    }


MODELS = {
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        text,
    ),
    "LlamaForCausalLM": ("LlamaConfig", {**SMALL, "num_key_value_heads": 2}, text),
    "BertForMaskedLM": ("BertConfig", SMALL, text),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0},
        text,
    ),
    "ViTForImageClassification": (
        "ViTConfig",
        {**{k: v for k, v in SMALL.items() if k not in ("vocab_size", "max_position_embeddings")},
         "image_size": 32, "patch_size": 8},
        pictures,
    ),
    "MixtralForCausalLM": (
        "MixtralConfig",
        {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True},
        text,
    ),
}  # fmt: skip


def workload_of(name):
    config, options, batch = MODELS[name]
    return Toy(lambda: getattr(transformers, name)(getattr(transformers, config)(**options)), batch)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("default")
def test_a_model_of_transformers_is_captured_unchanged(name):
    captured = capture(workload_of(name))
    assert captured.exact is not None
    lengths = "" if name.startswith("ViT") else " and lengths"
    assert captured.method == f"calls of the model, at two batch sizes{lengths}"
    assert captured.evaluation_note == ""
    assert not any(node.target == "autopipe.guards.expect" for node in captured.graph.nodes)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_model_of_70_billion_parameters_is_captured_without_memory():
    import resource

    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    captured = capture(Toy(lambda: model, text), model=model.train())
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert sum(torch.Size(spec.shape).numel() for spec in captured.graph.parameters.values()) > 70e9
    assert grown < 1 << 30
    assert "not verified: the model is on the meta device" in captured.notes
