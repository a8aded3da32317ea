"""``Coupling``: by how much microbatches change the gradient of a batch, and why. Measured at capture."""

from __future__ import annotations

from dataclasses import dataclass

COUPLED = 1e-3
"""The difference from which on microbatches are said to change the gradient."""
WHOLE_ABOVE = 0.01
"""A larger difference makes a planner choose one microbatch, unless an option gives their number."""


@dataclass(frozen=True, slots=True)
class Coupling:
    """The difference between a batch and its microbatches (``trace.loss.coupling``).

    Layers with batch statistics have those of the complete batch in both.
    """

    # of the gradients, relative to that of the batch; 0: no difference but rounding, or not measured
    error: float = 0.0
    # of the batch, and its microbatches
    samples: int = 0
    parts: int = 0
    # why, as a clause
    cause: str = ""
    # what would remove it, or ""
    advice: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.error < float("inf") or min(self.samples, self.parts) < 0:
            raise ValueError(f"error, samples and parts must be at least 0 and finite: {self}")

    @property
    def wants_whole(self) -> bool:
        """Whether a plan has one microbatch unless an option gives their number."""
        return self.error > WHOLE_ABOVE

    def text(self, num_microbatches: int | None = None) -> str:
        """Return one line on the difference and on a plan's microbatches, or "". None: there is no plan yet."""
        if not self.error:
            return ""
        if num_microbatches == 1:
            then = "so each minibatch is one microbatch (--num-microbatches M trains M microbatches, which differ)"
        elif num_microbatches is not None:
            then = f"training with {num_microbatches} microbatches is not training with whole minibatches"
        elif self.wants_whole:
            then = "so a plan has one microbatch, unless --num-microbatches or --microbatch-size is given"
        else:
            then = "training then depends on the microbatch size"
        return (
            f"{self.cause}: the gradients of {self.samples} samples and of {self.parts} microbatches of them differ by "
            f"{in_percent(self.error)}; {then}{self.advice}"
        )


def in_percent(error: float) -> str:
    """Return a relative difference in percent."""
    return f"{100 * error:.0f} %" if error >= 0.1 else f"{100 * error:.2g} %"
