"""GPT-2 of transformers, unchanged, with labels and a padding mask, over batches of 8 to 40 tokens."""

import torch
import transformers

LENGTHS = (24, 8, 40, 13)


def build_model():
    config = transformers.GPT2Config(
        vocab_size=60, n_positions=64, n_embd=16, n_layer=3, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def data(batch_size=6):
    generator = torch.Generator().manual_seed(4)
    for length in LENGTHS:
        ids = torch.randint(1, 60, (batch_size, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
