"""Loss scaling for float16. The scale is the same on every rank, because all ranks agree on overflows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LossScaler:
    """The rule of ``torch.amp.GradScaler``, with its defaults.

    If any gradient of any stage is not finite, all stages skip the step and the scale is halved. After ``interval``
    finite steps in a row it is doubled.
    """

    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    good_steps: int = 0

    @property
    def inverse(self) -> float:
        """The factor for gradients. The scale is a power of two, so it is exact."""
        return 1.0 / self.scale

    def update(self, overflow: bool) -> None:
        """Update the scale after a step. ``overflow``: the step was skipped."""
        if overflow:
            self.scale *= self.backoff
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.scale *= self.growth
            self.good_steps = 0
