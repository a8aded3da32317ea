"""What the plain loop computes from: the parts of a minibatch and their factors, by the code of ``autopipe.reference``.

A sample that the code of the ranks loses, or a wrong factor, would otherwise be on both sides of the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.reference import minibatches
from autopipe.runtime.step.loss_weights import Divisors
from autopipe.workload import Item, Workload


def parts_of(workload: Workload, item: Item, count: int) -> list[Item]:
    """Cut a minibatch into ``count`` parts, or as many as it has samples.

    A batch that is not cut along dimensions is cut by the user's ``split`` hook, or its list of samples.
    """
    dimensions = workload.cutting.of(item) if workload.cuts_by_dimension(item) else {}
    return minibatches.split(item, count, dimensions) if dimensions else workload.split(item, count)


def samples_of(workload: Workload, part: Item) -> int:
    """Return the number of samples of a part."""
    dimensions = workload.cutting.of(part) if workload.cuts_by_dimension(part) else {}
    return (minibatches.samples_in(part, dimensions) if dimensions else 0) or workload.num_samples(part)


def factors_of(samples: Sequence[int], divisors: Divisors | None) -> tuple[list[float], bool]:
    """Return the factor of each part's loss, and whether the terms of the loss ask for different ones."""
    if divisors is None:
        return minibatches.factors_of(samples)
    return minibatches.factors_of(samples, divisors.parts, divisors.whole, penalty=divisors.penalty)
