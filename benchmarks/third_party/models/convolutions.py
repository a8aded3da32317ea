"""Models of ConvNeXt and pytorch-cifar: unmodified code, each small enough for a test."""

import torch
from _repositories import repository

# model: its batches and its loss
MODELS = {
    "dla": ("images_32", "torch.nn.functional:cross_entropy"),
    "efficientnetb0": ("images_32", "torch.nn.functional:cross_entropy"),
    "lenet": ("images_32", "torch.nn.functional:cross_entropy"),
    "mobilenetv2": ("images_32", "torch.nn.functional:cross_entropy"),
    "preact_resnet18": ("images_32", "torch.nn.functional:cross_entropy"),
    "resnet18": ("images_32", "torch.nn.functional:cross_entropy"),
    "senet18": ("images_32", "torch.nn.functional:cross_entropy"),
    "shufflenetv2": ("images_32", "torch.nn.functional:cross_entropy"),
    "vgg11": ("images_32", "torch.nn.functional:cross_entropy"),
    "convnext_droppath": ("images_64", "torch.nn.functional:cross_entropy"),
}


def images_32(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield (torch.randn(batch_size, 3, 32, 32, generator=g), torch.randint(0, 10, (batch_size,), generator=g))


def images_64(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield (torch.randn(batch_size, 3, 64, 64, generator=g), torch.randint(0, 10, (batch_size,), generator=g))


def dla():
    repository("pytorch-cifar")
    from models.dla import DLA

    return DLA()


def efficientnetb0():
    repository("pytorch-cifar")
    from models.efficientnet import EfficientNetB0

    return EfficientNetB0()


def lenet():
    repository("pytorch-cifar")
    from models.lenet import LeNet

    return LeNet()


def mobilenetv2():
    repository("pytorch-cifar")
    from models.mobilenetv2 import MobileNetV2

    return MobileNetV2()


def preact_resnet18():
    repository("pytorch-cifar")
    from models.preact_resnet import PreActResNet18

    return PreActResNet18()


def resnet18():
    repository("pytorch-cifar")
    from models.resnet import ResNet18

    return ResNet18()


def senet18():
    repository("pytorch-cifar")
    from models.senet import SENet18

    return SENet18()


def shufflenetv2():
    repository("pytorch-cifar")
    from models.shufflenetv2 import ShuffleNetV2

    return ShuffleNetV2(0.5)


def vgg11():
    repository("pytorch-cifar")
    from models.vgg import VGG

    return VGG("VGG11")


def convnext_droppath():
    repository("ConvNeXt")
    from models.convnext import ConvNeXt

    return ConvNeXt(num_classes=10, depths=[1, 1, 2, 1], dims=[16, 24, 32, 48], drop_path_rate=0.3)
