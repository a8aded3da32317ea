"""Models of timm and torchvision, on small pictures if the model allows them, with dropout.

``TIMM`` and ``TORCHVISION`` are the first set; ``MORE_TIMM`` and ``MORE_TORCHVISION`` were chosen by name before any of
them was tested.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.workload import Batch, ZooWorkload

# name -> (size of the pictures, options of the model)
TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet18": (64, {}),
    "resnet50": (64, {"drop_path_rate": 0.1}),
    "resnext50_32x4d": (64, {}),
    "seresnet50": (64, {}),
    "resnetv2_50": (64, {}),
    "regnetx_002": (64, {}),
    "efficientnet_b0": (64, {"drop_path_rate": 0.1}),
    "mobilenetv2_050": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "convnext_atto": (64, {"drop_path_rate": 0.1}),
    "vit_tiny_patch16_224": (224, {"depth": 4, "drop_path_rate": 0.1}),
    "deit_tiny_distilled_patch16_224": (224, {"depth": 4}),
    "swin_tiny_patch4_window7_224": (224, {"depths": (2, 2), "embed_dim": 32, "num_heads": (2, 4)}),
    "mixer_s32_224": (224, {}),
    "gmlp_ti16_224": (224, {}),
    "cait_xxs24_224": (224, {"depth": 4}),
    "beit_base_patch16_224": (224, {"depth": 3, "embed_dim": 48, "num_heads": 4}),
    "densenet121": (64, {}),
    "vgg11_bn": (64, {}),
    "inception_v3": (128, {}),
    "xception41": (64, {}),
    "hrnet_w18_small": (64, {}),
    "dla34": (64, {}),
    "ghostnet_050": (64, {}),
    "levit_128s": (224, {}),
    "pvt_v2_b0": (64, {}),
    "poolformer_s12": (64, {}),
    "mobilevit_xxs": (64, {}),
}
TORCHVISION: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet18": (64, {}),
    "resnet50": (64, {}),
    "vgg11_bn": (64, {}),
    "alexnet": (64, {}),
    "densenet121": (64, {}),
    "mobilenet_v3_small": (64, {}),
    "shufflenet_v2_x0_5": (64, {}),
    "efficientnet_b0": (64, {}),
    "swin_t": (64, {}),
    "convnext_tiny": (64, {}),
}
MORE_TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "repvgg_a0": (64, {}),
    "skresnet18": (64, {}),
    "ese_vovnet19b_dw": (64, {}),
    "rexnet_100": (64, {"drop_path_rate": 0.1}),
    "lcnet_050": (64, {}),
    "eca_nfnet_l0": (64, {}),
    "lambda_resnet26t": (256, {}),
    "xcit_nano_12_p16_224": (64, {"depth": 3, "drop_path_rate": 0.1}),
    "convit_tiny": (224, {"depth": 3, "local_up_to_layer": 2}),
    "pit_ti_224": (224, {}),
    "crossvit_9_240": (240, {}),
    "twins_svt_small": (64, {"depths": (1, 1, 2, 1), "img_size": 64}),
    "edgenext_xx_small": (64, {"drop_path_rate": 0.1}),
    "coat_lite_tiny": (64, {"img_size": 64}),
    "hiera_tiny_224": (224, {"stages": (1, 1, 2, 1), "drop_path_rate": 0.1}),
}
MORE_TORCHVISION: dict[str, tuple[int, dict[str, Any]]] = {
    "squeezenet1_1": (64, {}),
    "mnasnet0_5": (64, {}),
    "regnet_y_400mf": (64, {}),
}


def _workload(name: str, size: int, build: Any) -> ZooWorkload:
    def batch(n: int, generator: torch.Generator) -> Batch:
        return {
            "x": torch.randn(n, 3, size, size, generator=generator),
            "labels": torch.randint(0, 10, (n,), generator=generator),
        }

    def loss(output: Any, item: Batch) -> Tensor:
        outputs = output if isinstance(output, tuple) else (output,)
        return torch.stack([nn.functional.cross_entropy(each, item["labels"]) for each in outputs]).sum()

    return ZooWorkload(name, build, batch, loss, ("x",))


def timm_workload(name: str) -> ZooWorkload:
    """Return the workload of a timm model."""
    import timm

    size, options = {**TIMM, **MORE_TIMM}[name]
    return _workload(name, size, lambda: timm.create_model(name, num_classes=10, drop_rate=0.1, **options))


def torchvision_workload(name: str) -> ZooWorkload:
    """Return the workload of a torchvision model."""
    import torchvision

    size, options = {**TORCHVISION, **MORE_TORCHVISION}[name]
    return _workload(name, size, lambda: getattr(torchvision.models, name)(num_classes=10, **options))


def importable() -> None:
    """Make a torchvision that was built for CUDA importable with a CPU build of torch, which lacks its operators."""
    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            _LIBRARY.define(schema)


_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
