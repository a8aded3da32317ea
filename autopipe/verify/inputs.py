"""What the plain loop computes from, written a second time: parts, factors and seeds come from no code that ranks run.

A sample that the shared code loses, a wrong factor or a wrong seed would otherwise be on both sides of the comparison.
docs/semantics.md defines all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from autopipe.draws import Draws, inside
from autopipe.runtime.step.shares import Divisors
from autopipe.workload import Item, Workload

_SAME = 1e-6  # factors of two terms of the loss that differ by less are the same


def parts_of(workload: Workload, item: Item, count: int) -> list[Item]:
    """Cut a minibatch into ``count`` parts, or as many as it has samples: their sizes differ by at most one.

    A batch that is not cut along dimensions is cut by the user's ``split`` hook, or its list of samples.
    """
    dimensions = workload.batch_dims(item) if workload.cuts_by_dimension(item) else {}
    if not dimensions:
        return workload.split(item, count)
    leaves = workload.leaves(item)
    samples = next(leaves[name].shape[dimension] for name, dimension in dimensions.items())
    count = max(min(count, samples), 1)
    if count == 1:
        return [item]
    parts, start = [], 0
    for index in range(count):
        size = samples // count + (index < samples % count)
        cut = {name: leaves[name].narrow(dimension, start, size) for name, dimension in dimensions.items()}
        parts.append(workload.with_leaves(item, cut))
        start += size
    return parts


def samples_of(workload: Workload, part: Item) -> int:
    """Return the number of samples of a part."""
    dimensions = workload.batch_dims(part) if workload.cuts_by_dimension(part) else {}
    leaves = workload.leaves(part)
    return next((leaves[name].shape[d] for name, d in dimensions.items()), 0) or workload.num_samples(part)


def factors_of(samples: Sequence[int], divisors: Divisors | None) -> tuple[list[float], bool]:
    """Return the factor of each part's loss, and whether the terms of the loss ask for different ones."""
    total = sum(samples)
    by_samples = [count / total for count in samples]
    terms = []
    for index, whole in enumerate(() if divisors is None else divisors.whole):
        if divisors is not None and whole:
            terms.append([part[index] / whole for part in divisors.parts])
    if divisors is None or not terms:
        return by_samples, False
    apart = max(max(column) - min(column) for column in zip(*terms, strict=True))
    if divisors.penalty:
        apart = max(apart, *(abs(sum(term) - 1) for term in terms))
    if apart > _SAME:
        return by_samples, True
    return by_samples if by_samples in terms else terms[0], False


class PlainDraws(Draws):  # type: ignore[no-untyped-call]  # torch has no annotation for its __init_subclass__
    """``Draws`` with seeds of its own."""

    @staticmethod
    def seed(where: tuple[int, int, int], position: int) -> int:
        """Return the seed of a draw: SplitMix64 (Steele, Lea and Flood 2014) over the four numbers."""
        state = 0
        for number in (*where, position):
            state = (state + number + 0x9E3779B97F4A7C15) % 2**64
            state = (state ^ (state // 2**30)) * 0xBF58476D1CE4E5B9 % 2**64
            state = (state ^ (state // 2**27)) * 0x94D049BB133111EB % 2**64
            state ^= state // 2**31
        return state // 2

    def inside(self, position: int) -> AbstractContextManager[Any]:
        """Seed an opaque module with the seeds of this class."""
        return inside(self.where, position, PlainDraws)
