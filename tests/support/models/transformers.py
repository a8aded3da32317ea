"""Small transformers of the library of that name."""

import functools

import torch

from support.models.trace import Toy

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip


def text(n, generator, words=96):
    ids = torch.randint(1, words, (n, 16), generator=generator)
    ids[0, 0] = words - 1
    return {"input_ids": ids, "labels": ids}


def pictures(n, generator):
    labels = torch.randint(0, 2, (n,), generator=generator)
    return {"pixel_values": torch.randn(n, 3, 16, 16, generator=generator), "labels": labels}


MODELS = {
    "GPT2LMHeadModel": (
        "GPT2Config",  # a vocabulary that no team divides, as the 50,257 words of the real one
        {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        functools.partial(text, words=97),
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
    return Toy(lambda: _built(name, config, options), batch)


def _built(name, config, options):
    import transformers

    return getattr(transformers, name)(getattr(transformers, config)(**options))
