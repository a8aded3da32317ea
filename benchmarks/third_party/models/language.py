"""Language models and related models of seven repositories: unmodified code, small enough for a test."""

import torch
import torch.nn.functional as F
from _repositories import repository

# model: its batches and its loss
MODELS = {
    "attention_is_all": ("attention_is_all_batches", "attention_is_all_loss"),
    "mingpt_logits": ("tokens", "mingpt_logits_loss"),
    "nanogpt": ("nanogpt_batches", "nanogpt_loss"),
    "openai_whisper": ("openai_whisper_batches", "openai_whisper_loss"),
    "gpt_fast": ("tokens", "openai_whisper_loss"),
    "kv_cache": ("tokens", "openai_whisper_loss"),
    "llama3_bf16": ("tokens", "openai_whisper_loss"),
    "mla": ("tokens", "openai_whisper_loss"),
    "qwen3": ("tokens", "openai_whisper_loss"),
    "swa": ("tokens", "openai_whisper_loss"),
    "rwkv_v1_mha_pro": ("tokens", "mingpt_logits_loss"),
}


def attention_is_all_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        src, trg = torch.randint(2, 50, (2, batch_size, 10), generator=g)
        src[::2, 8:] = 1
        yield ((src, trg[:, :-1]), trg[:, 1:])


def tokens(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = torch.randint(0, 64, (batch_size, 17), generator=g)
        yield (ids[:, :-1], ids[:, 1:])


def nanogpt_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = torch.randint(0, 64, (batch_size, 17), generator=g)
        yield {"idx": ids[:, :-1], "targets": ids[:, 1:].contiguous()}


def openai_whisper_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = torch.randint(0, 50, (batch_size, 12), generator=g)
        yield ((torch.randn(batch_size, 8, 32, generator=g), ids[:, :-1]), ids[:, 1:])


def attention_is_all_loss(output, target):
    return F.cross_entropy(output, target.flatten(), ignore_index=1)


def mingpt_logits_loss(output, target):
    return F.cross_entropy(output[0].flatten(0, 1), target.flatten())


def nanogpt_loss(output, target=None):
    return output[1]


def openai_whisper_loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def attention_is_all():
    repository("attention-is-all-you-need-pytorch")
    from transformer.Models import Transformer

    return Transformer(
        50,
        50,
        src_pad_idx=1,
        trg_pad_idx=1,
        d_word_vec=32,
        d_model=32,
        d_inner=64,
        n_layers=2,
        n_head=2,
        d_k=16,
        d_v=16,
        dropout=0.1,
        n_position=20,
    )


def mingpt_logits():
    repository("minGPT")
    from mingpt.model import GPT

    c = GPT.get_default_config()
    c.model_type, c.n_layer, c.n_head, c.n_embd, c.vocab_size, c.block_size = (None, 3, 2, 32, 64, 16)
    return GPT(c)


def nanogpt():
    repository("nanoGPT")
    from model import GPT, GPTConfig

    return GPT(GPTConfig(block_size=16, vocab_size=64, n_layer=4, n_head=2, n_embd=32, dropout=0.0))


def openai_whisper():
    repository("whisper")
    from whisper.model import ModelDimensions, Whisper

    return Whisper(
        ModelDimensions(
            n_mels=8,
            n_audio_ctx=16,
            n_audio_state=32,
            n_audio_head=2,
            n_audio_layer=2,
            n_vocab=50,
            n_text_ctx=12,
            n_text_state=32,
            n_text_head=2,
            n_text_layer=2,
        )
    )


def gpt_fast():
    repository("LLMs-from-scratch/pkg")
    from llms_from_scratch.ch04 import GPTModelFast

    return GPTModelFast(
        dict(vocab_size=64, context_length=16, emb_dim=32, n_heads=2, n_layers=3, drop_rate=0.0, qkv_bias=False)
    )


def kv_cache():
    repository("LLMs-from-scratch/ch04/03_kv-cache")
    from gpt_with_kv_cache import GPTModel

    return GPTModel(
        dict(
            vocab_size=64,
            context_length=16,
            emb_dim=32,
            n_heads=4,
            n_layers=3,
            drop_rate=0.0,
            qkv_bias=False,
            kv_window_size=16,
        )
    )


def llama3_bf16():
    repository("LLMs-from-scratch/pkg")
    from llms_from_scratch.llama3 import Llama3Model

    return Llama3Model(
        dict(
            vocab_size=64,
            context_length=32,
            emb_dim=32,
            n_heads=4,
            n_layers=3,
            hidden_dim=64,
            n_kv_groups=2,
            rope_base=500000.0,
            dtype=torch.bfloat16,
            rope_freq=dict(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=32),
        )
    )


def mla():
    repository("LLMs-from-scratch/ch04/05_mla")
    from gpt_with_kv_mla import GPTModel

    return GPTModel(
        dict(
            vocab_size=64,
            context_length=16,
            emb_dim=32,
            n_heads=4,
            n_layers=3,
            drop_rate=0.0,
            qkv_bias=False,
            latent_dim=16,
        )
    )


def qwen3():
    repository("LLMs-from-scratch/pkg")
    from llms_from_scratch.qwen3 import Qwen3Model

    return Qwen3Model(
        dict(
            vocab_size=64,
            context_length=32,
            emb_dim=32,
            n_heads=4,
            n_layers=3,
            hidden_dim=64,
            head_dim=8,
            qk_norm=True,
            n_kv_groups=2,
            rope_base=1000000.0,
            dtype=torch.float32,
        )
    )


def swa():
    repository("LLMs-from-scratch/ch04/06_swa")
    from gpt_with_kv_swa import GPTModel

    return GPTModel(
        dict(
            vocab_size=64,
            context_length=16,
            emb_dim=32,
            n_heads=4,
            n_layers=3,
            drop_rate=0.0,
            qkv_bias=False,
            sliding_window_size=4,
            sliding_window_stride=2,
        )
    )


def rwkv_v1_mha_pro():
    repository("RWKV-LM/RWKV-v1")
    from src.model import GPT, GPTConfig

    return GPT(
        GPTConfig(
            64,
            16,
            model_type="MHA_pro",
            n_layer=3,
            n_head=2,
            n_embd=32,
            n_attn=32,
            n_ffn=32,
            rwkv_emb_scale=0.4,
            rwkv_tiny_attn=0,
            rwkv_tiny_head=8,
        )
    )
