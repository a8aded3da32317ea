"""Derive the arithmetic of a number from its values at two shapes of the batch.

::

    the same twice    a constant
    k*u + c           u: the batch size, or a length
    v*(k*u + c)       v: the batch size; u: a length
    k*u*w             the batch size squared, the product of two lengths, all of them together

Two shapes suffice, because the differences between them are prime numbers: a linear function of one size is not a
linear function of another, unless a factor is a multiple of that prime. Verification then tries a third shape on real
numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopipe.trace.sizes.align import GraphsDiffer


@dataclass(frozen=True, slots=True)
class Size:
    """The size ``times * (factor * of + offset)``, where ``times`` and ``of`` are products of sizes of the batch."""

    factor: int
    offset: int
    of: tuple[int, ...] = (0,)  # indices of the sizes that are multiplied; 0 is the batch size, then the lengths
    times: tuple[int, ...] = ()  # likewise

    @classmethod
    def through(cls, first: tuple[tuple[int, ...], int], second: tuple[tuple[int, ...], int]) -> Size:
        """Return the arithmetic for the numbers at two shapes, each given as (batch size and lengths, number).

        Raises: GraphsDiffer if no supported form matches.
        """
        (s, x), (t, y) = first, second
        sizes: list[Size] = []
        for times, of in _forms(len(s)):
            a, b = _product(s, times), _product(t, times)
            if x % a or y % b:
                continue
            u, v = _product(s, of), _product(t, of)
            if u == v:
                continue
            factor, rest = divmod(y // b - x // a, v - u)
            offset = x // a - factor * u
            # through two points a square looks like a line far below zero
            if not rest and (not offset or (len(of) == 1 and offset > -u * v)):
                sizes.append(cls(factor, offset, of, times))
        if not sizes:
            raise GraphsDiffer(f"no formula gives size {x} at {_shape(s)} and {y} at {_shape(t)}")
        return next((size for size in sizes if not size.offset), sizes[0])

    def __str__(self) -> str:
        inner = "*".join(f"s{index}" for index in self.of)
        if self.factor != 1:
            inner = f"{inner}*{self.factor}"
        if self.offset:
            inner = f"{inner}{self.offset:+d}"
        if not self.times:
            return inner
        return "*".join([*(f"s{index}" for index in self.times), f"({inner})" if self.offset else inner])


def _forms(count: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the (times, of) pairs to try, the simplest first. ``count``: 1 for the batch size, plus the lengths."""
    lengths = range(1, count)
    for index in range(count):
        yield (), (index,)
    for index in lengths:
        yield (0,), (index,)
    yield (), (0, 0)
    for pair in itertools.combinations_with_replacement(lengths, 2):
        yield (), pair
        yield (0,), pair


def _product(sizes: tuple[int, ...], which: tuple[int, ...]) -> int:
    return math.prod(sizes[index] for index in which)


def _shape(sizes: tuple[int, ...]) -> str:
    lengths = "".join(f" of length {size}" for size in sizes[1:2]) + "".join(f" and {size}" for size in sizes[2:])
    return f"{sizes[0]} samples{lengths}"
