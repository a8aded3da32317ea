"""``Shares``: the factor of each microbatch's loss in the loss of its minibatch.

If the loss is a mean over samples, the factor is n_j / n. Otherwise it is the divisor of the loss in the microbatch,
divided by the one in the whole minibatch. So the weighted losses of the microbatches add up to that of the minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_AGREE = 1e-6  # two terms whose shares differ by less have the same shares, except for rounding


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
