"""``Shares``: what each microbatch counts in the loss of its minibatch.

Where the loss is a mean over samples that is n_j / n. Else a share is what the loss divides by in the part, over what
it divides by in the whole minibatch: so the microbatches add up to the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_AGREE = 1e-6  # shares of two terms that differ by less are the same but for rounding


@dataclass(frozen=True, slots=True)
class Shares:
    """``factors``: of each microbatch. 0 where its loss has nothing to average over and so is not a number.

    ``total``: what the minibatch weighs beside others, in an evaluation. ``disagreement``: the largest difference
    between the shares that two terms of the loss ask for; then ``factors`` are those of the samples.
    """

    factors: tuple[float, ...]
    total: float
    disagreement: float = 0.0

    @staticmethod
    def of_samples(samples: Sequence[int]) -> Shares:
        """Return the shares of parts with so many samples each."""
        total = sum(samples)
        return Shares(tuple(count / total for count in samples), float(total))

    @staticmethod
    def of(
        whole: Sequence[float], parts: Sequence[Sequence[float]], samples: Sequence[int], *, penalty: bool = False
    ) -> Shares:
        """Return the shares of parts from the divisors of each term of the loss, in the whole and in each part.

        Whole numbers should be ints: their quotients are rounded only once. ``penalty``: the loss has a term that does
        not depend on the batch, so the shares must add up to 1.
        """
        plain = Shares.of_samples(samples)
        terms = [
            Shares(tuple(values[term] / full for values in parts), float(full))
            for term, full in enumerate(whole)
            if full  # else the term is not a number in the whole batch either
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
