"""Sizes other than the batch size that may vary between batches: sequence lengths, nodes and edges, boxes.

They are guessed from the example, or found where the batches of the data differ (``varying_lengths``), and accepted
only if the recordings agree and real batches of that length compare equal (``api.capture``). A wrong guess costs one
recording; an undetected length is captured per shape instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autopipe.workload import Item, Workload
from autopipe.workload.batches.layouts import laid_out

_SHORTEST = 4  # smaller sizes are numbers of classes or coordinates rather than lengths
_MOST = 2  # source and target of an encoder-decoder
_MOST_VARYING = 16  # sizes in which batches of the data differ
_LARGER = 8  # multiple of the largest size in the data at which the second recording is made
_DIVISORS = range(2, 9)  # numbers of which code may ask whether a size is a multiple
_NEAR = 1000  # candidates that are looked through for a size that differs in its divisors
_TABLES = 2  # tables (of positions, for example) whose end is tried as a length


@dataclass(frozen=True, slots=True)
class Length:
    """A size that tensors of the batch share."""

    places: tuple[tuple[str, int], ...]  # (input, dimension) of each tensor that has it
    size: int  # in the example
    largest: int = 0  # in the data, if it was found there
    smallest: int = 0  # in the data, if it was found there


def found_lengths(
    model: nn.Module, leaves: Mapping[str, Tensor], dimensions: Mapping[str, int], count: int
) -> tuple[Length, ...]:
    """Return the lengths of a batch of ``count`` samples. ``dimensions``: by tensor, the one that counts them.

    Lengths are the first other dimension of integers (tokens, labels), and dimensions of vectors in a row, ``[batch,
    length, width]``, that equal no size of the model. Every dimension of that size counts as the same length.
    """
    taken = sizes_of(model)
    wanted: dict[int, None] = {}
    for name, leaf in leaves.items():
        if leaf.dim() not in (2, 3) or name not in dimensions:
            continue
        others = [int(size) for dimension, size in enumerate(leaf.shape) if dimension != dimensions[name]]
        if not leaf.is_floating_point() and not leaf.is_complex():
            wanted[others[0]] = None
        else:
            wanted.update({size: None for size in others if size not in taken})
    lengths = []
    for size in wanted:
        if size < _SHORTEST or size == count:
            continue
        places = [
            (name, dimension)
            for name, leaf in leaves.items()
            for dimension in range(leaf.dim())
            if leaf.shape[dimension] == size and dimension != dimensions.get(name)
        ]
        lengths.append(Length(tuple(places), size))
    return tuple(lengths) if len(lengths) <= _MOST else ()


def varying_lengths(
    leaves: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]], dimensions: Mapping[str, int]
) -> tuple[Length, ...]:
    """Return the sizes in which other batches of the data differ from a batch.

    Dimensions that have the same size in each of the batches are one length. A size of 0 stays fixed.
    ``dimensions``: by tensor, the one that counts the samples.
    """
    groups: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for name, leaf in leaves.items():
        for dimension, size in enumerate(leaf.shape):
            sizes = (int(size), *(int(other[name].shape[dimension]) for other in others))
            if size and len(set(sizes)) > 1 and dimension != dimensions.get(name):
                groups.setdefault(sizes, []).append((name, dimension))
    lengths = tuple(Length(tuple(places), sizes[0], max(sizes), min(sizes)) for sizes, places in groups.items())
    return lengths if len(lengths) <= _MOST_VARYING else ()


def spread(lengths: Sequence[Length]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield pairs of small and large sizes at which a model with these lengths is recorded, in the order to try them.

    Each difference is a prime number that exceeds the sum of the smaller ones, so that sums can be distinguished. A
    large size is a multiple of numbers of which the small one is not, so that code that asks for multiples shows. A
    model may treat a size of 1 in another way, and then the smallest size is 5.
    """
    largest = max(length.largest for length in lengths)
    primes = [number for number in range(5, 8 * len(lengths) + 8) if _is_prime(number)]
    for small in ([1] * len(lengths), primes[: len(lengths)]):
        large, total = list[int](), _LARGER * largest
        for size in small:
            step = math.lcm(*(number for number in _DIVISORS if math.gcd(number, size) == 1))
            first = (total + size) // step * step + step
            large.append(next(number for number in itertools.count(first, step) if _is_prime(number - size)))
            total += large[-1] - size
        yield tuple(small), tuple(large)


def sizes_of(model: nn.Module) -> set[int]:
    """Return every size of the model's parameters and buffers."""
    state = (tensor for tensor in (*model.parameters(), *model.buffers()) if not is_lazy(tensor))
    return {int(size) for tensor in state for size in tensor.shape}


def other_sizes(workload: Workload, item: Item) -> set[int]:
    """Return every size of a batch except the number of its samples."""
    dimensions = workload.batch_dims(item)
    return {
        int(size)
        for name, leaf in workload.leaves(item).items()
        for dimension, size in enumerate(leaf.shape)
        if dimension != dimensions.get(name)
    }


def other_lengths(size: int, taken: set[int]) -> tuple[int, ...]:
    """Return the lengths for a second recording, in the order in which they are tried.

    The candidates are four times the size, the end of a larger table of the model, for models that stop there, and a
    shorter length. Each differs by a prime number, so that a rounded size does not look linear: a length padded to a
    multiple of 8, or halved, differs by a number that this prime does not divide. Of the first candidates, those come
    first whose divisors differ most from those of the size, so that code that asks for multiples shows. ``taken``:
    sizes of the model.
    """
    tables = sorted((n for n in taken if size < n < 4 * size), reverse=True)[:_TABLES]
    larger = [n for n in range(4 * size, 8 * size)[:_NEAR] if n not in taken and _is_prime(n - size)]
    ways = [
        sorted(larger, key=lambda n: _distinguished(n, size), reverse=True),
        *(range(table, size, -1) for table in tables),
        (n for n in range(max(size // 2, 2), 1, -1) if n not in taken),
    ]
    primes = (next((n for n in way if _is_prime(abs(n - size)) and abs(n - size) > 2), 0) for way in ways)
    return tuple(dict.fromkeys(n for n in primes if n))


def shorter(size: int) -> tuple[int, ...]:
    """Return the lengths at which real batches are compared, shortest first."""
    return tuple(dict.fromkeys(cut for cut in (2, size // 4, 3 * size // 4) if 1 < cut < size))


def shorter_parts(lengths: tuple[Length, ...]) -> range:
    """Return the indices of the shorter lengths, from the shortest on. None without lengths."""
    return range(min((len(shorter(length.size)) for length in lengths), default=0))


def shortened(workload: Workload, item: Item, lengths: tuple[Length, ...], part: int) -> Item:
    """Return a batch at the shorter length with index ``part``."""
    leaves = workload.leaves(item)
    cut = dict(leaves)
    for length in lengths:
        for name, dimension in length.places:
            cut[name] = cut[name].narrow(dimension, 0, shorter(length.size)[part])
    cut = {name: laid_out(leaf, leaves[name]) if leaf is not leaves[name] else leaf for name, leaf in cut.items()}
    return workload.with_leaves(item, cut)


def _distinguished(one: int, two: int) -> int:
    """Return how many numbers divide one of two sizes and not the other."""
    return sum((one % number == 0) != (two % number == 0) for number in _DIVISORS)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
