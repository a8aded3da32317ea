# fmt: off
"""A Llama from a transformers config, trained on source text of the standard library: a model file of nine lines."""
import pathlib, torch, transformers  # noqa: E401, I001
def build_model(layers=4, width=128):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, hidden_size=width, use_cache=False,
        num_hidden_layers=layers, num_attention_heads=4, intermediate_size=3 * width, max_position_embeddings=128))
def data(batch_size=16):
    text = torch.tensor(list(pathlib.Path(pathlib.__file__).read_bytes()))[:32768].view(-1, 128)
    return [{"input_ids": ids, "labels": ids} for ids in text.split(batch_size)]
