"""Models of vit-pytorch for videos, sequences, lists and training without labels: unmodified code."""

import torch
from _repositories import repository

SMALL = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "heads": 2, "dim_head": 16, "mlp_dim": 64}

SMALL_VIDEO = {
    "image_size": 16,
    "image_patch_size": 8,
    "frame_patch_size": 2,
    "num_classes": 10,
    "dim": 32,
    "heads": 2,
    "dim_head": 16,
    "mlp_dim": 64,
}

# model: its batches and its loss
MODELS = {
    "na_vit": ("na_vit_nested_tensor_batches", "torch.nn.functional:cross_entropy"),
    "simple_vit_1d": ("vit_1d_batches", "torch.nn.functional:cross_entropy"),
    "vivit_factorized_encoder": ("videos", "torch.nn.functional:cross_entropy"),
    "vit_3d": ("videos", "torch.nn.functional:cross_entropy"),
    "cct_3d": ("videos", "torch.nn.functional:cross_entropy"),
    "dino": ("dino_batches", "dino_loss"),
    "lejepa": ("dino_batches", "lejepa_loss"),
    "mpp": ("mpp_batches", "dino_loss"),
    "na_vit_nested_tensor": ("na_vit_nested_tensor_batches", "torch.nn.functional:cross_entropy"),
    "simmim": ("simmim_batches", "dino_loss"),
    "simple_flash_attn_vit_3d": ("videos", "torch.nn.functional:cross_entropy"),
    "simple_vit_3d": ("videos", "torch.nn.functional:cross_entropy"),
    "vat": ("vat_batches", "dino_loss"),
    "vit_1d": ("vit_1d_batches", "torch.nn.functional:cross_entropy"),
    "vit_nd": ("videos", "torch.nn.functional:cross_entropy"),
    "vit_nd_rotary": ("videos", "torch.nn.functional:cross_entropy"),
    "vivit_factorized_sa": ("videos", "torch.nn.functional:cross_entropy"),
}


def dino_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield {"x": torch.rand(batch_size, 3, 32, 32, generator=g)}


def mpp_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield {"input": torch.rand(batch_size, 3, 32, 32, generator=g)}


def na_vit_nested_tensor_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    sizes = [(32, 32), (16, 32), (32, 16), (16, 16)]
    for _ in range(4):
        images = [torch.randn(3, *sizes[i % 4], generator=g) for i in range(batch_size)]
        yield ((images,), torch.randint(0, 10, (batch_size,), generator=g))


def simmim_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield {"img": torch.randn(batch_size, 3, 32, 32, generator=g)}


def videos(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield (torch.randn(batch_size, 3, 4, 16, 16, generator=g), torch.randint(0, 10, (batch_size,), generator=g))


def vat_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield {
            "video_or_image": torch.randn(batch_size, 1, 3, 32, 32, generator=g),
            "actions": torch.randn(batch_size, 4, 6, generator=g),
        }


def vit_1d_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield (torch.randn(batch_size, 3, 64, generator=g), torch.randint(0, 10, (batch_size,), generator=g))


def dino_loss(output, target=None):
    return output


def lejepa_loss(output, target=None):
    return output[0] if isinstance(output, tuple) else output


def dino():
    repository("vit-pytorch")
    from vit_pytorch.dino import Dino
    from vit_pytorch.vit import ViT

    return Dino(
        ViT(**SMALL, depth=3),
        image_size=32,
        hidden_layer="to_latent",
        projection_hidden_size=32,
        projection_layers=2,
        num_classes_K=64,
    )


def lejepa():
    repository("vit-pytorch")
    from vit_pytorch.lejepa import LeJEPA
    from vit_pytorch.vit import ViT

    return LeJEPA(
        ViT(**SMALL, depth=3),
        image_size=32,
        hidden_layer="to_latent",
        projection_hidden_size=32,
        projection_layers=2,
        num_classes_K=64,
        sigreg_loss_kwargs=dict(num_slices=32, domain=(-5, 5), num_knots=17),
    )


def mpp():
    repository("vit-pytorch")
    from vit_pytorch.deepvit import DeepViT
    from vit_pytorch.mpp import MPP

    return MPP(transformer=DeepViT(**SMALL, depth=3), patch_size=8, dim=32)


def na_vit_nested_tensor():
    repository("vit-pytorch")
    from vit_pytorch.na_vit_nested_tensor import NaViT

    return NaViT(**SMALL, depth=4, token_dropout_prob=0.1)


def simmim():
    repository("vit-pytorch")
    from vit_pytorch.deepvit import DeepViT
    from vit_pytorch.simmim import SimMIM

    return SimMIM(encoder=DeepViT(**SMALL, depth=3), masking_ratio=0.5)


def simple_flash_attn_vit_3d():
    repository("vit-pytorch")
    from vit_pytorch.simple_flash_attn_vit_3d import SimpleViT

    return SimpleViT(**SMALL_VIDEO, frames=4, depth=4)


def simple_vit_3d():
    repository("vit-pytorch")
    from vit_pytorch.simple_vit_3d import SimpleViT

    return SimpleViT(**SMALL_VIDEO, frames=4, depth=4)


def vat():
    repository("vit-pytorch")
    from vit_pytorch.vat import VAT, ViT

    return VAT(
        ViT(**SMALL, depth=3), dim=32, depth=3, heads=2, dim_head=16, dim_action=6, mlp_dim=64, action_chunk_len=4
    )


def vit_1d():
    repository("vit-pytorch")
    from vit_pytorch.vit_1d import ViT

    return ViT(seq_len=64, patch_size=8, num_classes=10, dim=32, depth=4, heads=2, dim_head=16, mlp_dim=64)


def vit_nd():
    repository("vit-pytorch")
    from vit_pytorch.vit_nd import ViTND

    return ViTND(
        ndim=3,
        input_shape=(4, 16, 16),
        patch_size=(2, 8, 8),
        num_classes=10,
        dim=32,
        depth=4,
        heads=2,
        dim_head=16,
        mlp_dim=64,
    )


def vit_nd_rotary():
    repository("vit-pytorch")
    from vit_pytorch.vit_nd_rotary import ViTND

    return ViTND(
        ndim=3,
        input_shape=(4, 16, 16),
        patch_size=(2, 8, 8),
        num_classes=10,
        dim=32,
        depth=4,
        heads=2,
        dim_head=16,
        mlp_dim=64,
    )


def vivit_factorized_sa():
    repository("vit-pytorch")
    from vit_pytorch.vivit import ViViT

    return ViViT(**SMALL_VIDEO, frames=4, spatial_depth=2, temporal_depth=2, variant="factorized_self_attention")


def cct_3d():
    repository("vit-pytorch")
    from vit_pytorch.cct_3d import CCT

    return CCT(
        img_size=16,
        num_frames=4,
        embedding_dim=32,
        n_conv_layers=1,
        frame_kernel_size=3,
        kernel_size=3,
        stride=1,
        padding=1,
        num_layers=3,
        num_heads=2,
        mlp_ratio=2.0,
        num_classes=10,
        positional_embedding="learnable",
    )


def vit_3d():
    repository("vit-pytorch")
    from vit_pytorch.vit_3d import ViT

    return ViT(**SMALL_VIDEO, frames=4, depth=3)


def vivit_factorized_encoder():
    repository("vit-pytorch")
    from vit_pytorch.vivit import ViViT

    return ViViT(**SMALL_VIDEO, frames=4, spatial_depth=2, temporal_depth=2)


def simple_vit_1d():
    repository("vit-pytorch")
    from vit_pytorch.simple_vit_1d import SimpleViT

    return SimpleViT(seq_len=64, patch_size=8, num_classes=10, dim=32, depth=4, heads=2, dim_head=16, mlp_dim=64)


def na_vit():
    repository("vit-pytorch")
    from vit_pytorch.na_vit import NaViT

    return NaViT(**SMALL, depth=3, token_dropout_prob=0.1)
