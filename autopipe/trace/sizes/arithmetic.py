"""Derive the arithmetic of a number from its values at two shapes of the batch.

::

    the same twice    a constant
    k*u + c           u: the batch size, or a length
    v*(k*u + c)       v: the batch size; u: a length
    k*u*w             the batch size squared, the product of two lengths, all of them together
    k*(u + w + ...)   a sum of lengths, such as the boxes of all images

Two shapes suffice, because the differences between them are prime numbers: a linear function of one size is not a
linear function of another, unless a factor is a multiple of that prime. A sum is found if each difference exceeds the
sum of the smaller ones. Verification then tries a third shape on real numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopipe.trace.sizes.align import GraphsDiffer

_MOST_OF_SUM = 16  # the largest multiple of a sum of lengths that is tried


@dataclass(frozen=True, slots=True)
class Size:
    """The size ``times * (factor * (of + also) + offset)``: ``times`` and ``of`` are products, ``also`` is a sum."""

    factor: int
    offset: int
    of: tuple[int, ...] = (0,)  # indices of the sizes that are multiplied; 0 is the batch size, then the lengths
    times: tuple[int, ...] = ()  # likewise
    also: tuple[int, ...] = ()  # indices of further lengths, which are added

    @classmethod
    def through(cls, first: tuple[tuple[int, ...], int], second: tuple[tuple[int, ...], int]) -> Size:
        """Return the arithmetic for the numbers at two shapes, each given as (batch size and lengths, number).

        Raises: GraphsDiffer if no supported form matches.
        """
        (s, x), (t, y) = first, second
        sizes: list[Size] = []
        for times, of in _forms(len(s)):
            a, b = _product(s, times), _product(t, times)
            if not a or x % a or y % b:
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
            sizes.extend(_sums(s, t, x, y))
        if not sizes:
            raise GraphsDiffer(f"no formula gives size {x} at {_shape(s)} and {y} at {_shape(t)}")
        return next((size for size in sizes if not size.offset), sizes[0])

    def __str__(self) -> str:
        inner = "*".join(f"s{index}" for index in self.of)
        if self.also:
            inner = "+".join([inner, *(f"s{index}" for index in self.also)])
            inner = f"({inner})" if self.factor != 1 else inner
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


def _sums(first: tuple[int, ...], second: tuple[int, ...], x: int, y: int) -> Iterator[Size]:
    """Yield multiples of sums of lengths that are ``x`` with the first sizes and ``y`` with the second."""
    apart = [b - a for a, b in zip(first, second, strict=True)]
    for factor in range(1, _MOST_OF_SUM + 1):
        rest, chosen = y - x, list[int]()
        for index in sorted(range(1, len(first)), key=lambda index: -apart[index]):
            if 0 < factor * apart[index] <= rest:
                rest -= factor * apart[index]
                chosen.append(index)
        if not rest and len(chosen) > 1 and factor * sum(first[index] for index in chosen) == x:
            of, *also = sorted(chosen)
            yield Size(factor, 0, (of,), also=tuple(also))


def _product(sizes: tuple[int, ...], which: tuple[int, ...]) -> int:
    return math.prod(sizes[index] for index in which)


def _shape(sizes: tuple[int, ...]) -> str:
    lengths = "".join(f" of length {size}" for size in sizes[1:2]) + "".join(f" and {size}" for size in sizes[2:])
    return f"{sizes[0]} samples{lengths}"
