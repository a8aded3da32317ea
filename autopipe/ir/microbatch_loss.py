"""Microbatches and the loss of their minibatch: how much they change its gradient, and the factor of each one's loss.

If the loss is a mean over samples, the factor is n_j / n. Otherwise it is the divisor of the loss in the microbatch,
divided by the one in the whole minibatch. So the weighted losses of the microbatches add up to that of the minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COUPLED = 1e-3
"""The difference from which on microbatches are said to change the gradient."""
WHOLE_ABOVE = 0.01
"""A larger difference makes a planner choose one microbatch, unless an option gives their number."""

_AGREE = 1e-6  # two terms whose shares differ by less have the same shares, except for rounding


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


@dataclass(frozen=True, slots=True)
class Shares:
    """The factors of a minibatch."""

    factors: tuple[float, ...]  # of each microbatch; 0 if its divisor is 0, so that its loss is not a number
    total: float  # the weight of the minibatch among others, in an evaluation
    # the largest difference between the shares of two terms of the loss; if it is not 0, ``factors`` are n_j / n
    disagreement: float = 0.0

    @staticmethod
    def of_samples(samples: Sequence[int]) -> Shares:
        """Return the shares n_j / n of microbatches with these numbers of samples."""
        total = sum(samples)
        return Shares(tuple(count / total for count in samples), float(total))

    @staticmethod
    def of(
        whole: Sequence[float], parts: Sequence[Sequence[float]], samples: Sequence[int], *, penalty: bool = False
    ) -> Shares:
        """Return the shares from the divisors of the loss.

        ``whole``: the divisor of each term of the loss, in the minibatch. ``parts``: the same in each microbatch. Whole
        numbers should be ints: their quotients are rounded only once. ``samples``: of each microbatch. ``penalty``: the
        loss has a term that does not depend on the batch, so the shares must add up to 1.
        """
        plain = Shares.of_samples(samples)
        terms = [
            Shares(tuple(values[term] / full for values in parts), float(full))
            for term, full in enumerate(whole)
            if full  # if it is 0, the term is not a number in the whole batch either
        ]
        if not terms:
            return Shares(plain.factors, 0.0)
        pairs = [(a, b) for one in terms for other in terms for a, b in zip(one.factors, other.factors, strict=True)]
        difference = max(abs(a - b) for a, b in pairs)
        if penalty:
            difference = max(difference, *(abs(sum(term.factors) - 1.0) for term in terms))
        if difference > _AGREE:
            return Shares(plain.factors, plain.total, difference)
        return next((term for term in terms if term.factors == plain.factors), terms[0])
