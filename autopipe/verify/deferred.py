"""Deferred batch statistics, computed a second time: by the mean and the squared deviations of each microbatch.

The plain loop uses the class of the ranks (``runtime.step.deferred``), whose order of sums gives the same bits. Where
its statistics are wrong by more than rounding, these take their place, so that the comparison fails.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autopipe.verify.comparison import relative_error

_ROUNDING = 1e-5


class OwnStatistics:
    """The statistics of every BatchNorm of a model over one minibatch. Made before ``DeferredStatistics``."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [
            layer
            for layer in model.modules()
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None and layer.track_running_stats
        ]
        # by layer: how many values a channel has, their mean, and the sum of the squared deviations from it
        self._sums: list[tuple[float, Tensor, Tensor] | None] = [None] * len(self._layers)
        for index, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(self._hook(index))

    def _hook(self, index: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if not layer.training:
                return
            values = inputs[0].detach().double().transpose(0, 1).flatten(1)
            count, mean = float(values.shape[1]), values.mean(1)
            deviations = (values - mean[:, None]).pow(2).sum(1)
            before = self._sums[index]
            if before is not None:  # Chan, Golub and LeVeque 1979
                total, apart = before[0] + count, mean - before[1]
                deviations = before[2] + deviations + apart.pow(2) * (before[0] * count / total)
                mean, count = before[1] + apart * (count / total), total
            self._sums[index] = count, mean, deviations

        return add

    @torch.no_grad()
    def commit(self, shared: Callable[[], None]) -> None:
        """Let ``shared`` update the running statistics, and correct what it computes wrongly."""
        expected = [self._updated(layer, sums) for layer, sums in zip(self._layers, self._sums, strict=True)]
        shared()
        for layer, buffers in zip(self._layers, expected, strict=True):
            for name, value in buffers.items():
                actual = getattr(layer, name)
                if relative_error(actual.to(value), value) > _ROUNDING:
                    actual.copy_(value)
        self._sums = [None] * len(self._layers)

    def _updated(self, layer: _BatchNorm, sums: tuple[float, Tensor, Tensor] | None) -> dict[str, Tensor]:
        """Return the buffers of a layer after a minibatch; {} if it had none, or no finite one."""
        if sums is None or layer.running_mean is None or layer.running_var is None or not _finite(*sums[1:]):
            return {}
        count, mean, deviations = sums
        factor = layer.momentum
        buffers = {}
        if layer.num_batches_tracked is not None:
            buffers["num_batches_tracked"] = layer.num_batches_tracked + 1
            factor = 1 / float(buffers["num_batches_tracked"]) if factor is None else factor
        factor, variance = factor or 0.0, deviations / max(count - 1, 1)
        buffers["running_mean"] = layer.running_mean.double() * (1 - factor) + mean * factor
        buffers["running_var"] = layer.running_var.double() * (1 - factor) + variance * factor
        return buffers


def _finite(*tensors: Tensor) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
