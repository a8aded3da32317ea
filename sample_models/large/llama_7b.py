# fmt: off
"""Llama 2 with 7 B parameters from a transformers config, to plan for devices that you do not have (docs/fit.md)."""
import torch, transformers  # noqa: E401, I001
def build_model(layers=32, width=4096, hidden=11008, heads=32, vocabulary=32000):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocabulary, hidden_size=width,
        intermediate_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, use_cache=False))
def data(batch_size=256, length=2048, vocabulary=32000):
    ids = torch.randint(vocabulary, (batch_size, length), generator=torch.Generator().manual_seed(0))
    yield {"input_ids": ids, "labels": ids}
