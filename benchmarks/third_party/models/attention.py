"""Models of x-transformers: unmodified code, each small enough for a test."""

import torch
import torch.nn.functional as F
from _repositories import repository

# model: its batches and its loss
MODELS = {
    "autoregressive": ("autoregressive_batches", "autoregressive_loss"),
    "continuous": ("continuous_batches", "torch.nn.functional:mse_loss"),
    "decoder_alibi_layerdrop": ("tokens", "decoder_alibi_layerdrop_loss"),
    "decoder_hyper": ("tokens", "decoder_alibi_layerdrop_loss"),
    "encoder_rotary_glu": ("tokens", "decoder_alibi_layerdrop_loss"),
    "vit": ("images_32", "torch.nn.functional:cross_entropy"),
}


def autoregressive_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield {"x": torch.randint(0, 64, (batch_size, 16), generator=g)}


def continuous_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.randn(batch_size, 16, 12, generator=g)
        yield (x[..., :8], x[..., 8:])


def tokens(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = torch.randint(0, 64, (batch_size, 17), generator=g)
        yield (ids[:, :-1], ids[:, 1:])


def images_32(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield (torch.randn(batch_size, 3, 32, 32, generator=g), torch.randint(0, 10, (batch_size,), generator=g))


def autoregressive_loss(output, target=None):
    return output


def decoder_alibi_layerdrop_loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def autoregressive():
    repository("x-transformers")
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    return AutoregressiveWrapper(
        TransformerWrapper(
            num_tokens=64, max_seq_len=16, attn_layers=Decoder(dim=32, depth=3, heads=2, attn_dim_head=16)
        )
    )


def continuous():
    repository("x-transformers")
    from x_transformers import ContinuousTransformerWrapper, Encoder

    return ContinuousTransformerWrapper(
        dim_in=8, dim_out=4, max_seq_len=16, attn_layers=Encoder(dim=32, depth=3, heads=2, attn_dim_head=16)
    )


def decoder_alibi_layerdrop():
    repository("x-transformers")
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(
        num_tokens=64,
        max_seq_len=16,
        emb_dropout=0.1,
        attn_layers=Decoder(
            dim=32,
            depth=3,
            heads=2,
            attn_dim_head=16,
            alibi_pos_bias=True,
            layer_dropout=0.2,
            attn_dropout=0.1,
            ff_dropout=0.1,
        ),
    )


def decoder_hyper():
    repository("x-transformers")
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(
        num_tokens=64,
        max_seq_len=16,
        attn_layers=Decoder(dim=32, depth=3, heads=2, attn_dim_head=16, num_residual_streams=4),
    )


def encoder_rotary_glu():
    repository("x-transformers")
    from x_transformers import Encoder, TransformerWrapper

    return TransformerWrapper(
        num_tokens=64,
        max_seq_len=16,
        attn_layers=Encoder(
            dim=64, depth=3, heads=2, attn_dim_head=32, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True
        ),
    )


def vit():
    repository("x-transformers")
    from x_transformers import Encoder, ViTransformerWrapper

    return ViTransformerWrapper(
        image_size=32, patch_size=8, num_classes=10, attn_layers=Encoder(dim=32, depth=3, heads=2, attn_dim_head=16)
    )
