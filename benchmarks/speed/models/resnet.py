"""``sample_models/resnet.py`` without the last, smaller minibatch of an epoch, which torch splits in another way."""

from collections.abc import Iterable

import torch

from sample_models.resnet import build_model, digits, loss, optimizer

__all__ = ["build_model", "data", "loss", "optimizer"]


def data(batch_size: int = 32) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = digits()
    dataset = torch.utils.data.TensorDataset(images[:1500], labels[:1500])
    return torch.utils.data.DataLoader(dataset, batch_size, shuffle=True, drop_last=True)
