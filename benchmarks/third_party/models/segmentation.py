"""Models of Pytorch-UNet, detr and segmentation_models.pytorch: unmodified code, each small enough for a test."""

import torch
import torch.nn.functional as F
from _repositories import repository

# model: its batches and its loss
MODELS = {
    "detr_nested": ("detr_nested_batches", "detr_nested_loss"),
    "deeplabv3plus": ("masks_64", "torch.nn.functional:binary_cross_entropy_with_logits"),
    "linknet": ("masks_64", "torch.nn.functional:binary_cross_entropy_with_logits"),
    "pan": ("masks_128", "torch.nn.functional:binary_cross_entropy_with_logits"),
    "segformer": ("masks_64", "torch.nn.functional:binary_cross_entropy_with_logits"),
    "unetplusplus": ("masks_64", "torch.nn.functional:binary_cross_entropy_with_logits"),
    "unet_milesial": ("unet_milesial_batches", "torch.nn.functional:cross_entropy"),
}


def detr_nested_batches(batch_size):
    repository("detr")
    from util.misc import NestedTensor

    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        images, mask = (
            torch.rand(batch_size, 3, 64, 64, generator=g),
            torch.zeros(batch_size, 64, 64, dtype=torch.bool),
        )
        yield ((NestedTensor(images, mask),), torch.randint(0, 20, (batch_size, 6), generator=g))


def masks_64(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield (
            torch.rand(batch_size, 3, 64, 64, generator=g),
            torch.randint(0, 2, (batch_size, 1, 64, 64), generator=g).float(),
        )


def masks_128(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield (
            torch.rand(batch_size, 3, 128, 128, generator=g),
            torch.randint(0, 2, (batch_size, 1, 128, 128), generator=g).float(),
        )


def unet_milesial_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield (torch.rand(batch_size, 3, 32, 32, generator=g), torch.randint(0, 2, (batch_size, 32, 32), generator=g))


def detr_nested_loss(output, target):
    return F.cross_entropy(output["pred_logits"].flatten(0, 1), target.flatten()) + output["pred_boxes"].mean()


def detr_nested():
    repository("detr")
    from types import SimpleNamespace

    from models import build_model as build_detr

    ARGS = SimpleNamespace(
        dataset_file="voc",
        device="cpu",
        lr_backbone=1e-05,
        masks=False,
        backbone="resnet18",
        dilation=False,
        position_embedding="sine",
        hidden_dim=32,
        dropout=0.1,
        nheads=2,
        dim_feedforward=64,
        enc_layers=2,
        dec_layers=2,
        pre_norm=False,
        num_queries=6,
        aux_loss=False,
        set_cost_class=1,
        set_cost_bbox=5,
        set_cost_giou=2,
        bbox_loss_coef=5,
        giou_loss_coef=2,
        eos_coef=0.1,
        frozen_weights=None,
    )
    import torchvision

    make = torchvision.models.resnet18
    torchvision.models.resnet18 = lambda pretrained=False, **options: make(**options)
    try:
        return build_detr(ARGS)[0]
    finally:
        torchvision.models.resnet18 = make


def deeplabv3plus():
    repository("segmentation_models.pytorch")
    import segmentation_models_pytorch as smp

    return smp.DeepLabV3Plus("resnet18", encoder_weights=None)


def linknet():
    repository("segmentation_models.pytorch")
    import segmentation_models_pytorch as smp

    return smp.Linknet("resnet18", encoder_weights=None)


def pan():
    repository("segmentation_models.pytorch")
    import segmentation_models_pytorch as smp

    return smp.PAN("resnet18", encoder_weights=None)


def segformer():
    repository("segmentation_models.pytorch")
    import segmentation_models_pytorch as smp

    return smp.Segformer("mit_b0", encoder_weights=None)


def unetplusplus():
    repository("segmentation_models.pytorch")
    import segmentation_models_pytorch as smp

    return smp.UnetPlusPlus("resnet18", encoder_weights=None, decoder_channels=(32, 16, 16, 8, 8))


def unet_milesial():
    repository("Pytorch-UNet")
    from unet import UNet

    return UNet(n_channels=3, n_classes=2, bilinear=True)
