"""Deferred BatchNorm: running statistics are updated once per minibatch, from all of its microbatches.

Each microbatch is still normalised on its own. Only the statistics for evaluation are gathered over the minibatch, so
that they do not depend on the number of microbatches.

Source: torchgpipe, arXiv:2004.09910 ("deferred batch normalization" of its documentation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autopipe.runtime.step.scalars import read_together


@dataclass(slots=True)
class _Sums:
    """The sums of one layer since the last step."""

    module: _BatchNorm
    # [2, channels]: sum and sum of squares
    totals: torch.Tensor
    # how many values a channel had
    count: torch.Tensor


@dataclass(slots=True)
class DeferredStatistics:
    """Gathers the statistics of every BatchNorm of a module."""

    # set while a forward is recomputed, which must not count again
    paused: bool = False
    _layers: list[_Sums] = field(default_factory=list)

    @staticmethod
    def of(module: nn.Module) -> DeferredStatistics:
        """Replace the update of every BatchNorm that keeps running statistics."""
        statistics = DeferredStatistics()
        for layer in module.modules():
            if not isinstance(layer, _BatchNorm) or layer.running_mean is None or not layer.track_running_stats:
                continue
            # without this, torch updates nothing in training, and still reads the statistics in evaluation
            layer.track_running_stats = False
            zero = torch.zeros_like(layer.running_mean, dtype=torch.float64)
            sums = _Sums(layer, torch.stack([zero, zero]), torch.zeros((), dtype=torch.float64))
            statistics._layers.append(sums)
            layer.register_forward_pre_hook(statistics._gather(sums))
        return statistics

    def _gather(self, sums: _Sums) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if self.paused or not module.training:
                return
            values = inputs[0].detach().double()
            dimensions = [d for d in range(values.dim()) if d != 1]
            sums.totals = sums.totals.to(values.device) + torch.stack(
                [values.sum(dimensions), values.pow(2).sum(dimensions)]
            )
            sums.count = sums.count + values.numel() / values.size(1)

        return hook

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that replicas sum in place, layer by layer."""
        return [tensor for sums in self._layers for tensor in (sums.totals, sums.count)]

    @torch.no_grad()
    def commit(self) -> None:
        """Update the running statistics as one forward over the complete minibatch would."""
        counts = [float(sums.count) for sums in self._layers]  # on the host
        finite = read_together([sums.totals.isfinite().all() for sums in self._layers]).tolist()
        for sums, count, is_finite in zip(self._layers, counts, finite, strict=True):
            layer = sums.module
            if count == 0 or layer.running_mean is None or layer.running_var is None:
                continue
            if not is_finite:  # a step that is not finite is left out
                sums.totals, sums.count = torch.zeros_like(sums.totals), torch.zeros_like(sums.count)
                continue
            mean = sums.totals[0] / count
            variance = (sums.totals[1] / count - mean.pow(2)) * (count / max(count - 1, 1))
            factor = layer.momentum
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.add_(1)
                factor = 1.0 / float(layer.num_batches_tracked) if factor is None else factor
            for running, new in ((layer.running_mean, mean), (layer.running_var, variance)):
                running.mul_(1 - (factor or 0.0)).add_(new.to(running.dtype), alpha=factor or 0.0)
            sums.totals = torch.zeros_like(sums.totals)
            sums.count = torch.zeros_like(sums.count)


class ReplicaStatistics:
    """The sums of one stage's layers, one set per replica. They are added before ``commit``.

    ``written`` names the buffers of the stage by first name; the layers of ``module`` that hold them belong to it.
    ``first``: other name -> first name.
    """

    def __init__(
        self,
        deferred: DeferredStatistics,
        module: nn.Module,
        written: Iterable[str],
        first: Mapping[str, str],
        replicas: int,
    ) -> None:
        names = frozenset(written)
        own = set()
        for path, layer in module.named_modules(remove_duplicate=False):
            full = f"{path}.running_mean" if path else "running_mean"
            if first.get(full, full) in names:
                own.add(id(layer))
        self._layers = [sums for sums in deferred._layers if id(sums.module) in own]
        self._empty = [(sums.totals, sums.count) for sums in self._layers]
        self._each = [list(self._empty) for _ in range(replicas)]
        self._used = -1

    def use(self, replica: int) -> None:
        """Let the layers gather into the sums of a replica."""
        self._keep()
        self._used = replica
        for sums, (totals, count) in zip(self._layers, self._each[replica], strict=True):
            sums.totals, sums.count = totals, count

    def _keep(self) -> None:
        if self._used >= 0:
            self._each[self._used] = [(sums.totals, sums.count) for sums in self._layers]

    def average(self) -> None:
        """Add the sums of the replicas, in the order of the ranks."""
        self._keep()
        for index, sums in enumerate(self._layers):
            sums.totals, sums.count = self._each[0][index]
            for each in self._each[1:]:
                sums.totals, sums.count = sums.totals + each[index][0], sums.count + each[index][1]
        self._each = [list(self._empty) for _ in self._each]
        self._used = -1
