"""Averaged weights (``--ema DECAY``): an exponential moving average of a stage's parameters, updated after each step.

The definition is that of ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``: the first update
copies the weights, every later one is ``average.lerp_(weight, 1 - decay)``. Averages are float32, or float64 for
float64 weights. Buffers are not averaged, as in ``AveragedModel`` with ``use_buffers=False``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from autopipe.runtime.checkpoint.checkpoint import Checkpoint

PREFIX = "average."
"""Of their names in a checkpoint."""


def average_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the average of a weight."""
    return dtype if dtype.is_complex or dtype == torch.float64 else torch.float32


class Averages:
    """The averages of one rank.

    ``decay`` is in (0, 1). ``averaged``: by stage, the parameters that it steps and that change.
    """

    def __init__(self, decay: float, averaged: Mapping[int, Mapping[str, nn.Parameter]]) -> None:
        self.decay = decay
        self._averaged = averaged
        self._values: dict[int, dict[str, Tensor]] = {stage: {} for stage in averaged}

    @torch.no_grad()
    def update(self, stage: int) -> None:
        """Update the averages of a stage from its current weights."""
        values = self._values[stage]
        for name, parameter in self._averaged[stage].items():
            weight = parameter.detach().to(average_dtype(parameter.dtype))
            if name in values:
                values[name].lerp_(weight, 1 - self.decay)
            else:
                values[name] = weight.clone()

    def of(self, stage: int) -> dict[str, Tensor]:
        """Return the averages of a stage by name of the parameter. Empty before the first step."""
        return self._values[stage]

    def restore(self, stage: int, source: Checkpoint, own: Callable[[str, Tensor], Tensor]) -> None:
        """Restore the averages of a stage. If the checkpoint has no averages, they start with the next step.

        ``own``: takes this member's part of a tensor.
        """
        wanted = [f"{PREFIX}{name}" for name in self._averaged[stage]]
        if not any(name.startswith(PREFIX) for name in source.names):
            return
        read = source.read(wanted)
        for name, parameter in self._averaged[stage].items():
            key = f"{PREFIX}{name}"
            like = torch.empty_like(parameter, dtype=average_dtype(parameter.dtype), requires_grad=False)
            self._values[stage][name] = like.copy_(own(key, read[key]))
