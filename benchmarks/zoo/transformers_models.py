"""44 models of the transformers library, with a few thousand parameters each and their own dropout."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo.workload import Batch, ZooWorkload

TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
GPT = {"vocab_size": 99, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
SEQ2SEQ = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
VISION = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32,
    "patch_size": 8, "num_labels": 5,
}  # fmt: skip
AUDIO = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip


def text(n: int, generator: torch.Generator) -> Batch:
    """Token ids; every other sample is padded from the 14th token on."""
    ids = torch.randint(3, 99, (n, 16), generator=generator)
    mask = torch.ones(n, 16, dtype=torch.long)
    mask[::2, 13:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def bare_text(n: int, generator: torch.Generator) -> Batch:
    """Token ids without a mask."""
    ids = torch.randint(3, 99, (n, 16), generator=generator)
    return {"input_ids": ids, "labels": ids}


def images(n: int, generator: torch.Generator) -> Batch:
    """Pictures of 32 x 32 and their classes."""
    return {
        "pixel_values": torch.randn(n, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 5, (n,), generator=generator),
    }


def pairs(n: int, generator: torch.Generator) -> Batch:
    """Pictures and matching texts."""
    batch = {"input_ids": torch.randint(3, 99, (n, 16), generator=generator)}
    batch["pixel_values"] = torch.randn(n, 3, 32, 32, generator=generator)
    return {**batch, "return_loss": True}


def sounds(n: int, generator: torch.Generator) -> Batch:
    """Waves and letters."""
    return {
        "input_values": torch.randn(n, 1600, generator=generator),
        "labels": torch.randint(1, 31, (n, 6), generator=generator),
    }


def spectra(n: int, generator: torch.Generator) -> Batch:
    """Spectrograms and letters."""
    return {
        "input_features": torch.randn(n, 16, 32, generator=generator),
        "labels": torch.randint(3, 99, (n, 8), generator=generator),
    }


# name -> (class of the model, class of the configuration, options, batch)
MODELS: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT, text),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {"vocab_size": 99, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8,
         "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64},
        text,
    ),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 4}, text),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, text),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT, text),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**GPT, "rotary_dim": 4}, text),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, text),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 8}, text),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**GROUPED, "num_local_experts": 4, "output_router_logits": True},
        text,
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED, text),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 24},
        text,
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}, text),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 8}, text),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 8, "sliding_window": 8}, text),
    "phi": ("PhiForCausalLM", "PhiConfig", TEXT, text),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**TEXT, "alibi": True}, text),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 99, "hidden_size": 32, "n_layer": 3, "n_head": 4,
                                                 "hidden_dropout": 0.1}, text),
    "opt": ("OPTForCausalLM", "OPTConfig", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}, text),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", GROUPED, text),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", TEXT, text),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", GROUPED, text),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3,
                                                 "state_size": 4}, bare_text),
    "bert": ("BertForMaskedLM", "BertConfig", TEXT, text),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", TEXT, text),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": 99, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64},
        text,
    ),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**TEXT, "embedding_size": 16}, text),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**TEXT, "embedding_size": 16}, text),
    "deberta_v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", {**TEXT, "relative_attention": True,
                                                              "pos_att_type": ["p2c", "c2p"]}, text),
    "mpnet": ("MPNetForMaskedLM", "MPNetConfig", TEXT, text),
    "convbert": ("ConvBertForMaskedLM", "ConvBertConfig", {**TEXT, "embedding_size": 32}, text),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, text),
    "bart": ("BartForConditionalGeneration", "BartConfig", SEQ2SEQ, text),
    "bart_layerdrop": (
        "BartForConditionalGeneration",
        "BartConfig",
        {**SEQ2SEQ, "encoder_layerdrop": 0.3, "decoder_layerdrop": 0.3},
        text,
    ),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", SEQ2SEQ, text),
    "marian": ("MarianMTModel", "MarianConfig", {**SEQ2SEQ, "decoder_vocab_size": 99}, text),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 16, "eos_token_id": 2,
         "apply_spec_augment": False, "bos_token_id": 1},
        spectra,
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", VISION, images),
    "deit": ("DeiTForImageClassification", "DeiTConfig", VISION, images),
    "beit": ("BeitForImageClassification", "BeitConfig", VISION, images),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
         "num_labels": 5, "drop_path_rate": 0.1},
        images,
    ),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, "num_labels": 5, "drop_path_rate": 0.1},
        images,
    ),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", {"embedding_size": 8, "hidden_sizes": [16, 32],
                                                                "depths": [2, 2], "num_labels": 5}, images),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": {**TEXT, "projection_dim": 16, "eos_token_id": 2},
         "vision_config": {**VISION, "projection_dim": 16}, "projection_dim": 16},
        pairs,
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", {**AUDIO, "apply_spec_augment": False, "layerdrop": 0.0}, sounds),
}  # fmt: skip


def workload(name: str) -> ZooWorkload:
    """Return the workload of a model."""
    import transformers

    model, config, options, batch = MODELS[name]
    return ZooWorkload(name, lambda: getattr(transformers, model)(getattr(transformers, config)(**options)), batch)
