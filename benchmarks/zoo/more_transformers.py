"""38 further models of the transformers library, chosen by name before any of them was tested."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo.transformers_models import (
    AUDIO,
    GROUPED,
    SEQ2SEQ,
    T5,
    TEXT,
    VISION,
    bare_text,
    images,
    sounds,
    spectra,
    text,
)
from benchmarks.zoo.workload import Batch, ZooWorkload

LAYERS = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
IMAGE_TOKEN = 98


def bytes_of_text(n: int, generator: torch.Generator) -> Batch:
    """Characters, and one class per text."""
    return {**text(n, generator), "labels": torch.randint(0, 2, (n,), generator=generator)}


def boxes(n: int, generator: torch.Generator) -> Batch:
    """Words with their bounding boxes, and a class per word."""
    corners = torch.randint(0, 30, (n, 16, 2), generator=generator)
    sizes = torch.randint(1, 30, (n, 16, 2), generator=generator)
    labels = torch.randint(0, 2, (n, 16), generator=generator)
    return {**text(n, generator), "bbox": torch.cat([corners, corners + sizes], -1), "labels": labels}


def pictures(n: int, generator: torch.Generator) -> Batch:
    """Pictures without labels."""
    return {"pixel_values": torch.randn(n, 3, 32, 32, generator=generator)}


def segments(n: int, generator: torch.Generator) -> Batch:
    """Pictures and the class of every pixel."""
    return {**pictures(n, generator), "labels": torch.randint(0, 5, (n, 32, 32), generator=generator)}


def speech(n: int, generator: torch.Generator) -> Batch:
    """Spectrograms, time first, and letters."""
    batch = spectra(n, generator)
    return {**batch, "input_features": batch["input_features"].transpose(1, 2).contiguous()}


def captions(n: int, generator: torch.Generator) -> Batch:
    """Pictures and their captions."""
    return {**pictures(n, generator), **text(n, generator)}


def conversations(n: int, generator: torch.Generator) -> Batch:
    """Text that contains one picture, as one token per patch."""
    batch = captions(n, generator)
    batch["input_ids"] = torch.randint(3, IMAGE_TOKEN, (n, 24), generator=generator)
    batch["input_ids"][:, 2:18] = IMAGE_TOKEN
    mask = torch.ones(n, 24, dtype=torch.long)
    mask[::2, 21:] = 0
    return {**batch, "labels": batch["input_ids"], "attention_mask": mask}


def questions(n: int, generator: torch.Generator) -> Batch:
    """Pictures, questions, and a score for each answer."""
    return {**captions(n, generator), "labels": torch.rand(n, 5, generator=generator)}


def series(n: int, generator: torch.Generator) -> Batch:
    """Two measured values over time."""
    values = torch.randn(n, 36, 2, generator=generator)
    return {"past_values": values[:, :32], "future_values": values[:, 32:]}


# name -> (class of the model, class of the configuration, options, batch)
MODELS: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "biogpt": ("BioGptForCausalLM", "BioGptConfig", TEXT, text),
    "xglm": (
        "XGLMForCausalLM",
        "XGLMConfig",
        {"vocab_size": 99, "d_model": 32, "ffn_dim": 48, "num_layers": 3, "attention_heads": 4, "pad_token_id": 0,
         "max_position_embeddings": 64},
        text,
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", GROUPED, text),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "head_dim": 8, "sliding_window": 8}, text),
    "granite": ("GraniteForCausalLM", "GraniteConfig", GROUPED, text),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GROUPED, "resid_pdrop": 0.1, "embd_pdrop": 0.1}, text),
    "mpt": ("MptForCausalLM", "MptConfig", {"vocab_size": 99, "d_model": 32, "n_heads": 4, "n_layers": 3,
                                           "max_seq_len": 64, "resid_pdrop": 0.1}, text),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {**GROUPED, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4,
         "mamba_dt_rank": 4, "use_mamba_kernels": False, "output_router_logits": True},
        text,
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8,
         "n_groups": 1, "chunk_size": 8, "pad_token_id": 0},
        bare_text,
    ),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "lru_width": 32,
         "intermediate_size": 48, "attention_window_size": 8},
        text,
    ),
    "rwkv": (
        "RwkvForCausalLM",
        "RwkvConfig",
        {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "context_length": 64},
        bare_text,
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        "OlmoeConfig",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
        text,
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**TEXT, "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_group": 2,
         "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
         "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        text,
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        text,
    ),
    "xlnet": (
        "XLNetLMHeadModel",
        "XLNetConfig",
        {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        text,
    ),
    "funnel": (
        "FunnelForMaskedLM",
        "FunnelConfig",
        {"vocab_size": 99, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 32, "n_head": 4, "d_head": 8,
         "d_inner": 48},
        text,
    ),
    "layoutlm": (
        "LayoutLMForTokenClassification",
        "LayoutLMConfig",
        {**TEXT, "max_2d_position_embeddings": 64},
        boxes,
    ),
    "longformer": ("LongformerForMaskedLM", "LongformerConfig", {**TEXT, "attention_window": 8}, text),
    "big_bird": ("BigBirdForMaskedLM", "BigBirdConfig", {**TEXT, "block_size": 2, "num_random_blocks": 1}, text),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**TEXT, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2,
         "attention_dropout": 0.1, "mlp_dropout": 0.1},
        text,
    ),
    "fnet": (
        "FNetForMaskedLM",
        "FNetConfig",
        {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48,
         "max_position_embeddings": 64},
        bare_text,
    ),
    "nystromformer": (
        "NystromformerForMaskedLM",
        "NystromformerConfig",
        {**TEXT, "num_landmarks": 16, "segment_means_seq_len": 16, "conv_kernel_size": 5},
        text,
    ),
    "canine": (
        "CanineForSequenceClassification",
        "CanineConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
         "max_position_embeddings": 64, "num_hash_functions": 4, "num_hash_buckets": 32, "local_transformer_stride": 8},
        bytes_of_text,
    ),
    "led": (
        "LEDForConditionalGeneration",
        "LEDConfig",
        {**SEQ2SEQ, "attention_window": 8, "max_encoder_position_embeddings": 64,
         "max_decoder_position_embeddings": 64},
        text,
    ),
    "prophetnet": (
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        {"vocab_size": 99, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2, "encoder_ffn_dim": 48,
         "decoder_ffn_dim": 48, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "num_buckets": 8,
         "relative_max_distance": 16, "max_position_embeddings": 64},
        text,
    ),
    "m2m_100": ("M2M100ForConditionalGeneration", "M2M100Config", {**SEQ2SEQ, **LAYERS}, text),
    "switch_transformers": (
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {**T5, "num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
         "num_experts": 4, "expert_capacity": 16},
        text,
    ),
    "longt5": (
        "LongT5ForConditionalGeneration",
        "LongT5Config",
        {**T5, "num_layers": 2, "encoder_attention_type": "transient-global", "local_radius": 3,
         "global_block_size": 4},
        text,
    ),
    "dinov2": (
        "Dinov2ForImageClassification",
        "Dinov2Config",
        {**VISION, "hidden_dropout_prob": 0.1, "drop_path_rate": 0.1},
        images,
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
         "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
         "decoder_hidden_size": 32, "num_labels": 5},
        segments,
    ),
    "vit_mae": (
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        {**{key: value for key, value in VISION.items() if key != "num_labels"}, "decoder_hidden_size": 32,
         "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4, "decoder_intermediate_size": 48},
        pictures,
    ),
    "swinv2": (
        "Swinv2ForImageClassification",
        "Swinv2Config",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
         "num_labels": 5, "pretrained_window_sizes": [0, 0]},
        images,
    ),
    "hubert": ("HubertForCTC", "HubertConfig", {**AUDIO, "apply_spec_augment": False, "layerdrop": 0.0}, sounds),
    "speech_to_text": (
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        {**{key: value for key, value in SEQ2SEQ.items() if key != "max_position_embeddings"},
         "max_source_positions": 64, "max_target_positions": 64, "conv_channels": 32, "input_feat_per_channel": 16},
        speech,
    ),
    "blip": (
        "BlipForConditionalGeneration",
        "BlipConfig",
        {"text_config": {**TEXT, "encoder_hidden_size": 32, "projection_dim": 16, "bos_token_id": 1,
                         "sep_token_id": 2, "hidden_dropout_prob": 0.1},
         "vision_config": {**VISION, "projection_dim": 16, "initializer_range": 0.02}, "projection_dim": 16,
         "image_text_hidden_size": 16},
        captions,
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"text_config": {**GROUPED, "model_type": "llama"},
         "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 16},
         "image_token_index": IMAGE_TOKEN, "image_seq_length": 16},
        conversations,
    ),
    "vilt": (
        "ViltForQuestionAnswering",
        "ViltConfig",
        {**TEXT, **{key: value for key, value in VISION.items() if key != "num_hidden_layers"}},
        questions,
    ),
    "patchtst": (
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        {"num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "prediction_length": 4,
         "d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32, "ff_dropout": 0.1},
        series,
    ),
}  # fmt: skip


def workload(name: str) -> ZooWorkload:
    """Return the workload of a model."""
    import transformers

    model, config, options, batch = MODELS[name]
    return ZooWorkload(name, lambda: getattr(transformers, model)(getattr(transformers, config)(**options)), batch)
