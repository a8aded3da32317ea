"""Further models of vit-pytorch, added later: unmodified code, each small enough for a test."""

import torch
import torch.nn.functional as F
from _repositories import repository

SMALL = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "heads": 2, "dim_head": 16, "mlp_dim": 64}

# model: its batches and its loss
MODELS = {
    "ats_vit": ("images_32", "torch.nn.functional:cross_entropy"),
    "deepvit": ("images_32", "torch.nn.functional:cross_entropy"),
    "jet_vit": ("images_32", "torch.nn.functional:cross_entropy"),
    "parallel_vit": ("images_32", "torch.nn.functional:cross_entropy"),
    "rvt": ("images_32", "torch.nn.functional:cross_entropy"),
    "simple_flash_attn_vit": ("images_32", "torch.nn.functional:cross_entropy"),
    "simple_vit_attn_residual": ("images_32", "torch.nn.functional:cross_entropy"),
    "simple_vit_with_fft": ("images_32", "torch.nn.functional:cross_entropy"),
    "simple_vit_with_patch_dropout": ("images_32", "torch.nn.functional:cross_entropy"),
    "simple_vit_with_register_tokens": ("images_32", "torch.nn.functional:cross_entropy"),
    "simple_vit_with_value_residual": ("images_32", "torch.nn.functional:cross_entropy"),
    "vit": ("images_32", "torch.nn.functional:cross_entropy"),
    "vit_for_small_dataset": ("images_32", "torch.nn.functional:cross_entropy"),
    "vit_with_patch_dropout": ("images_32", "torch.nn.functional:cross_entropy"),
    "xcit": ("images_32", "torch.nn.functional:cross_entropy"),
    "xcit_layer_dropout": ("images_32", "torch.nn.functional:cross_entropy"),
    "cait_layer_dropout": ("images_32", "torch.nn.functional:cross_entropy"),
    "distill": ("distill_batches", "own_loss"),
    "es_vit": ("crops", "own_loss"),
    "levit": ("images_64", "torch.nn.functional:cross_entropy"),
    "mae": ("images_alone", "own_loss"),
    "max_vit_with_registers": ("images_64", "torch.nn.functional:cross_entropy"),
    "mp3": ("images_alone", "own_loss"),
    "nest": ("images_32", "torch.nn.functional:cross_entropy"),
    "twins_svt": ("images_64", "torch.nn.functional:cross_entropy"),
    "vit_with_decorr": ("images_32", "first_and_second"),
    "recorder": ("images_32", "first"),
}


def generator():
    return torch.Generator().manual_seed(0)


def classes(batch_size, g):
    return torch.randint(0, 10, (batch_size,), generator=g)


def images_32(batch_size):
    g = generator()
    for _ in range(4):
        yield torch.randn(batch_size, 3, 32, 32, generator=g), classes(batch_size, g)


def images_64(batch_size):
    g = generator()
    for _ in range(4):
        yield torch.randn(batch_size, 3, 64, 64, generator=g), classes(batch_size, g)


def images_alone(batch_size):
    g = generator()
    for _ in range(4):
        yield {"img": torch.randn(batch_size, 3, 32, 32, generator=g)}


def crops(batch_size):
    g = generator()
    for _ in range(4):
        yield {"x": torch.randn(batch_size, 3, 32, 32, generator=g)}


def distill_batches(batch_size):
    g = generator()
    for _ in range(4):
        yield {"img": torch.randn(batch_size, 3, 32, 32, generator=g), "labels": classes(batch_size, g)}


def own_loss(output, target=None):
    return output[0] if isinstance(output, tuple) else output


def first(output, target):
    return F.cross_entropy(output[0], target)


def first_and_second(output, target):
    return F.cross_entropy(output[0], target) + 0.1 * output[1]


def ats_vit():
    repository("vit-pytorch")
    from vit_pytorch.ats_vit import ViT

    return ViT(**SMALL, depth=3, max_tokens_per_depth=(12, 8, 6))


def deepvit():
    repository("vit-pytorch")
    from vit_pytorch.deepvit import DeepViT

    return DeepViT(**SMALL, depth=3)


def jet_vit():
    repository("vit-pytorch")
    from vit_pytorch.jet_vit import JetViT

    return JetViT(**SMALL, depth=3, window_size=2)


def parallel_vit():
    repository("vit-pytorch")
    from vit_pytorch.parallel_vit import ViT

    return ViT(**SMALL, depth=3)


def rvt():
    repository("vit-pytorch")
    from vit_pytorch.rvt import RvT

    return RvT(**SMALL, depth=3)


def simple_flash_attn_vit():
    repository("vit-pytorch")
    from vit_pytorch.simple_flash_attn_vit import SimpleViT

    return SimpleViT(**SMALL, depth=4, use_flash=True)


def simple_vit_attn_residual():
    repository("vit-pytorch")
    from vit_pytorch.simple_vit_attn_residual import SimpleViTAttnResidual

    return SimpleViTAttnResidual(**SMALL, depth=4)


def simple_vit_with_fft():
    repository("vit-pytorch")
    from vit_pytorch.simple_vit_with_fft import SimpleViT

    return SimpleViT(**SMALL, depth=4, freq_patch_size=8)


def simple_vit_with_patch_dropout():
    repository("vit-pytorch")
    from vit_pytorch.simple_vit_with_patch_dropout import SimpleViT

    return SimpleViT(**SMALL, depth=4)


def simple_vit_with_register_tokens():
    repository("vit-pytorch")
    from vit_pytorch.simple_vit_with_register_tokens import SimpleViT

    return SimpleViT(**SMALL, depth=4)


def simple_vit_with_value_residual():
    repository("vit-pytorch")
    from vit_pytorch.simple_vit_with_value_residual import SimpleViT

    return SimpleViT(**SMALL, depth=4)


def vit():
    repository("vit-pytorch")
    from vit_pytorch.vit import ViT

    return ViT(**SMALL, depth=4, dropout=0.1, emb_dropout=0.1)


def vit_for_small_dataset():
    repository("vit-pytorch")
    from vit_pytorch.vit_for_small_dataset import ViT

    return ViT(**SMALL, depth=4)


def vit_with_patch_dropout():
    repository("vit-pytorch")
    from vit_pytorch.vit_with_patch_dropout import ViT

    return ViT(**SMALL, depth=4)


def xcit():
    repository("vit-pytorch")
    from vit_pytorch.xcit import XCiT

    return XCiT(**SMALL, depth=3, cls_depth=2)


def xcit_layer_dropout():
    repository("vit-pytorch")
    from vit_pytorch.xcit import XCiT

    return XCiT(**SMALL, depth=3, cls_depth=2, layer_dropout=0.2)


def cait_layer_dropout():
    repository("vit-pytorch")
    from vit_pytorch.cait import CaiT

    return CaiT(**SMALL, depth=4, cls_depth=2, layer_dropout=0.2)


def distill():
    repository("vit-pytorch")
    from torchvision.models import resnet18
    from vit_pytorch.distill import DistillableViT, DistillWrapper

    return DistillWrapper(
        teacher=resnet18(num_classes=10), student=DistillableViT(**SMALL, depth=3), temperature=3, alpha=0.5
    )


def es_vit():
    repository("vit-pytorch")
    from torchvision.models import resnet18
    from vit_pytorch.es_vit import EsViTTrainer

    return EsViTTrainer(
        resnet18(num_classes=10),
        image_size=32,
        hidden_layer="layer4",
        projection_hidden_size=32,
        projection_layers=2,
        num_classes_K=64,
    )


def levit():
    repository("vit-pytorch")
    from vit_pytorch.levit import LeViT

    return LeViT(image_size=64, num_classes=10, stages=2, dim=(16, 32), depth=2, heads=(2, 4), mlp_mult=2, dropout=0.1)


def mae():
    repository("vit-pytorch")
    from vit_pytorch.deepvit import DeepViT
    from vit_pytorch.mae import MAE

    return MAE(
        encoder=DeepViT(**SMALL, depth=3),
        masking_ratio=0.75,
        decoder_dim=32,
        decoder_depth=2,
        decoder_heads=2,
        decoder_dim_head=16,
    )


def max_vit_with_registers():
    repository("vit-pytorch")
    from vit_pytorch.max_vit_with_registers import MaxViT

    return MaxViT(num_classes=10, dim=16, depth=(1, 1), dim_head=8, dim_conv_stem=8, window_size=4)


def mp3():
    repository("vit-pytorch")
    from vit_pytorch.mp3 import MP3, ViT

    return MP3(vit=ViT(**SMALL, depth=3), masking_ratio=0.75)


def nest():
    repository("vit-pytorch")
    from vit_pytorch.nest import NesT

    return NesT(image_size=32, patch_size=4, dim=16, heads=2, num_hierarchies=2, block_repeats=(1, 2), num_classes=10)


def twins_svt():
    repository("vit-pytorch")
    from vit_pytorch.twins_svt import TwinsSVT

    return TwinsSVT(
        num_classes=10,
        s1_emb_dim=8,
        s1_local_patch_size=4,
        s1_global_k=4,
        s2_emb_dim=16,
        s2_local_patch_size=4,
        s2_global_k=4,
        s3_emb_dim=16,
        s3_local_patch_size=2,
        s3_global_k=2,
        s3_depth=1,
        s4_emb_dim=32,
        s4_local_patch_size=2,
        s4_global_k=2,
        s4_depth=1,
    )


def vit_with_decorr():
    repository("vit-pytorch")
    from vit_pytorch.vit_with_decorr import ViT

    return ViT(**SMALL, depth=3)


def recorder():
    repository("vit-pytorch")
    from vit_pytorch.recorder import Recorder
    from vit_pytorch.vit import ViT

    return Recorder(ViT(**SMALL, depth=3))
