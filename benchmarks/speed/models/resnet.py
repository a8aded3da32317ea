"""``sample_models/resnet.py`` without the last, smaller minibatch of an epoch, which torch splits in another way."""

from collections.abc import Iterable

import torch

from sample_models import resnet
from sample_models.resnet import build_model, loss, optimizer

__all__ = ["build_model", "data", "loss", "optimizer"]


def data(batch_size: int = 32) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    return torch.utils.data.DataLoader(resnet.data().dataset, batch_size, shuffle=True, drop_last=True)
