"""Image classifiers of vit-pytorch: unmodified code, each small enough for a test."""

import torch
import torch.nn.functional as F
from _repositories import repository

SMALL = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "heads": 2, "dim_head": 16, "mlp_dim": 64}

# model: its batches and its loss
MODELS = {
    "adapter": ("images_32_2_classes", "torch.nn.functional:cross_entropy"),
    "cait": ("images_32", "torch.nn.functional:cross_entropy"),
    "cct": ("images_32", "torch.nn.functional:cross_entropy"),
    "cross_vit": ("images_32", "torch.nn.functional:cross_entropy"),
    "cvt": ("images_32", "torch.nn.functional:cross_entropy"),
    "efficient_xt": ("images_32", "torch.nn.functional:cross_entropy"),
    "extractor": ("images_32", "extractor_loss"),
    "jumbo_vit": ("images_32", "torch.nn.functional:cross_entropy"),
    "look_vit": ("images_48", "torch.nn.functional:cross_entropy"),
    "max_vit": ("images_32", "torch.nn.functional:cross_entropy"),
    "mobile_vit": ("images_64", "torch.nn.functional:cross_entropy"),
    "normalized_vit": ("images_32", "torch.nn.functional:cross_entropy"),
    "pit": ("images_32", "torch.nn.functional:cross_entropy"),
    "regionvit": ("images_64", "torch.nn.functional:cross_entropy"),
    "scalable_vit": ("images_32", "torch.nn.functional:cross_entropy"),
    "simple_vit": ("images_32", "torch.nn.functional:cross_entropy"),
    "simple_vit_orthog_residual_update": ("images_32", "torch.nn.functional:cross_entropy"),
    "simple_vit_with_hyper_connections": ("images_32", "torch.nn.functional:cross_entropy"),
    "simple_vit_with_qk_norm": ("images_32", "torch.nn.functional:cross_entropy"),
    "simple_vit_with_specialized_cls": ("images_32", "torch.nn.functional:cross_entropy"),
    "t2t": ("images_32", "torch.nn.functional:cross_entropy"),
    "vit_detpool": ("images_32", "torch.nn.functional:cross_entropy"),
    "vit_with_keel_post_ln": ("images_32", "torch.nn.functional:cross_entropy"),
    "vit_with_patch_merger": ("images_32", "torch.nn.functional:cross_entropy"),
    "wwt": ("images_32", "torch.nn.functional:cross_entropy"),
}


def images_32_2_classes(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield (torch.randn(batch_size, 3, 32, 32, generator=g), torch.randint(0, 2, (batch_size,), generator=g))


def images_32(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield (torch.randn(batch_size, 3, 32, 32, generator=g), torch.randint(0, 10, (batch_size,), generator=g))


def images_48(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield (torch.randn(batch_size, 3, 48, 48, generator=g), torch.randint(0, 10, (batch_size,), generator=g))


def images_64(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield (torch.randn(batch_size, 3, 64, 64, generator=g), torch.randint(0, 10, (batch_size,), generator=g))


def extractor_loss(output, target):
    return F.cross_entropy(output[0], target)


def adapter():
    repository("vit-pytorch")
    from vit_pytorch.learnable_memory_vit import Adapter, ViT

    return Adapter(vit=ViT(**SMALL, depth=3), num_classes=2, num_memories_per_layer=5)


def cait():
    repository("vit-pytorch")
    from vit_pytorch.cait import CaiT

    return CaiT(**SMALL, depth=4, cls_depth=2, dropout=0.1)


def cct():
    repository("vit-pytorch")
    from vit_pytorch.cct import CCT

    return CCT(
        img_size=32,
        embedding_dim=32,
        n_conv_layers=1,
        kernel_size=3,
        stride=1,
        padding=1,
        num_layers=4,
        num_heads=2,
        mlp_ratio=2.0,
        num_classes=10,
        positional_embedding="learnable",
    )


def cross_vit():
    repository("vit-pytorch")
    from vit_pytorch.cross_vit import CrossViT

    return CrossViT(
        image_size=32,
        num_classes=10,
        depth=2,
        sm_dim=16,
        sm_patch_size=4,
        sm_enc_depth=1,
        sm_enc_heads=2,
        sm_enc_mlp_dim=32,
        sm_enc_dim_head=8,
        lg_dim=32,
        lg_patch_size=8,
        lg_enc_depth=2,
        lg_enc_heads=2,
        lg_enc_mlp_dim=64,
        lg_enc_dim_head=16,
        cross_attn_depth=2,
        cross_attn_heads=2,
        cross_attn_dim_head=16,
    )


def cvt():
    repository("vit-pytorch")
    from vit_pytorch.cvt import CvT

    return CvT(
        num_classes=10,
        s1_emb_dim=16,
        s1_depth=1,
        s2_emb_dim=32,
        s2_heads=2,
        s2_depth=1,
        s3_emb_dim=48,
        s3_heads=2,
        s3_depth=2,
    )


def efficient_xt():
    repository("vit-pytorch")
    repository("x-transformers")
    from vit_pytorch.efficient import ViT
    from x_transformers import Encoder

    return ViT(
        dim=32,
        image_size=32,
        patch_size=8,
        num_classes=10,
        transformer=Encoder(dim=32, depth=3, heads=2, attn_dim_head=16, ff_glu=True, residual_attn=True),
    )


def extractor():
    repository("vit-pytorch")
    from vit_pytorch.extractor import Extractor
    from vit_pytorch.vit import ViT

    return Extractor(ViT(**SMALL, depth=3))


def jumbo_vit():
    repository("vit-pytorch")
    from vit_pytorch.jumbo_vit import JumboViT

    return JumboViT(**SMALL, depth=4)


def look_vit():
    repository("vit-pytorch")
    from vit_pytorch.look_vit import LookViT

    return LookViT(
        dim=32,
        image_size=48,
        num_classes=10,
        depth=2,
        patch_size=16,
        heads=2,
        dim_head=16,
        cross_attn_heads=2,
        cross_attn_dim_head=16,
    )


def max_vit():
    repository("vit-pytorch")
    from vit_pytorch.max_vit import MaxViT

    return MaxViT(num_classes=10, dim=16, dim_head=8, depth=(1, 1), window_size=4, dropout=0.1)


def mobile_vit():
    repository("vit-pytorch")
    from vit_pytorch.mobile_vit import MobileViT

    return MobileViT(
        image_size=(64, 64), dims=[16, 20, 24], channels=[8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 48], num_classes=10
    )


def normalized_vit():
    repository("vit-pytorch")
    from vit_pytorch.normalized_vit import nViT

    return nViT(**SMALL, depth=4)


def pit():
    repository("vit-pytorch")
    from vit_pytorch.pit import PiT

    return PiT(**SMALL, depth=(1, 2, 1), dropout=0.1)


def regionvit():
    repository("vit-pytorch")
    from vit_pytorch.regionvit import RegionViT

    return RegionViT(dim=(16, 24, 32, 48), depth=(1, 1, 1, 1), window_size=2, num_classes=10, use_peg=True)


def scalable_vit():
    repository("vit-pytorch")
    from vit_pytorch.scalable_vit import ScalableViT

    return ScalableViT(
        num_classes=10,
        dim=16,
        heads=(1, 2, 2, 2),
        depth=(1, 1, 1, 1),
        reduction_factor=(2, 2, 1, 1),
        window_size=(4, 4, None, None),
        ssa_dim_key=(8, 8, 8, 8),
    )


def simple_vit():
    repository("vit-pytorch")
    from vit_pytorch.simple_vit import SimpleViT

    return SimpleViT(**SMALL, depth=4)


def simple_vit_orthog_residual_update():
    repository("vit-pytorch")
    from vit_pytorch.simple_vit_orthog_residual_update import SimpleViT

    return SimpleViT(**SMALL, depth=4)


def simple_vit_with_hyper_connections():
    repository("vit-pytorch")
    from vit_pytorch.simple_vit_with_hyper_connections import SimpleViT

    return SimpleViT(**SMALL, depth=4, num_residual_streams=2)


def simple_vit_with_qk_norm():
    repository("vit-pytorch")
    from vit_pytorch.simple_vit_with_qk_norm import SimpleViT

    return SimpleViT(**SMALL, depth=4)


def simple_vit_with_specialized_cls():
    repository("vit-pytorch")
    from vit_pytorch.simple_vit_with_specialized_cls import SimpleViT

    return SimpleViT(**SMALL, depth=4)


def t2t():
    repository("vit-pytorch")
    from vit_pytorch.t2t import T2TViT

    return T2TViT(
        dim=32, image_size=32, depth=3, heads=2, mlp_dim=64, num_classes=10, dim_head=16, t2t_layers=((3, 2), (3, 2))
    )


def vit_detpool():
    repository("vit-pytorch")
    from vit_pytorch.vit_detpool import ViTDetPool

    return ViTDetPool(**SMALL, depth=4)


def vit_with_keel_post_ln():
    repository("vit-pytorch")
    from vit_pytorch.vit_with_keel_post_ln import ViT

    return ViT(**SMALL, depth=4)


def vit_with_patch_merger():
    repository("vit-pytorch")
    from vit_pytorch.vit_with_patch_merger import ViT

    return ViT(**SMALL, depth=4, patch_merge_layer=2, patch_merge_num_tokens=8)


def wwt():
    repository("vit-pytorch")
    from vit_pytorch.wwt import WWT

    return WWT(image_size=32, patch_size=8, num_classes=10, dim=32, depth=3, num_slots=4, heads=2, dim_head=16)
