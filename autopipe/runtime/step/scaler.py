"""Loss scaling for float16: one scale, the same on every rank, because all ranks agree on what was found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LossScaler:
    """The rule of ``torch.amp.GradScaler``, with its defaults.

    A step in which any gradient of any stage is not finite is left out by all stages, and the scale is halved; after
    ``interval`` steps in a row that were not, it is doubled.
    """

    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    good_steps: int = 0

    @property
    def inverse(self) -> float:
        """What gradients are multiplied with. The scale is a power of two, so this is exact."""
        return 1.0 / self.scale

    def update(self, found_inf: bool) -> None:
        """Take in whether the step was left out."""
        if found_inf:
            self.scale *= self.backoff
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.scale *= self.growth
            self.good_steps = 0
