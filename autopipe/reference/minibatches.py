"""The minibatches of plain training: read in order, split into microbatches, with the factor of each one's loss."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

SAME_FACTOR = 1e-6
"""Factors of two terms of the loss that differ by less are the same."""


def seed_of(*numbers: int) -> int:
    """Return the seed of some numbers: SplitMix64 (Steele, Lea and Flood 2014), finalized after each is added."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 1


def seed_all(seed: int) -> None:
    """Seed the global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def random_state(saved: tuple[Any, Any, Any] | None = None) -> tuple[Any, Any, Any]:
    """Return the state of the global generators, after restoring a saved one if given."""
    if saved is not None:
        torch.set_rng_state(saved[0])
        np.random.set_state(saved[1])
        random.setstate(saved[2])
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def read_in_order(data: Callable[[], Iterable[Any]], seed: int) -> Iterator[Any]:
    """Yield the minibatches. Each epoch calls ``data`` again, with a different seed."""
    for epoch in itertools.count():
        outside = random_state()
        seed_all(seed_of(seed, 0, epoch, 1 << 40))
        iterator = iter(data())
        while (item := next(iterator, None)) is not None:
            inside = random_state()
            random_state(outside)
            yield {str(k): v for k, v in item.items()} if isinstance(item, Mapping) else tuple(item)
            outside = random_state()
            random_state(inside)
        random_state(outside)


def first_dimensions(batch: Any) -> dict[int, int]:
    """Return position among the leaves -> 0 for each tensor whose first dimension is that of the first tensor."""
    leaves = pytree.tree_leaves(batch)
    tensors = {p: leaf for p, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    size = next((tensor.shape[0] for tensor in tensors.values()), 0)
    return {position: 0 for position, tensor in tensors.items() if tensor.shape[0] == size}


def samples_in(batch: Any, dimensions: Mapping[int, int]) -> int:
    """Return the number of samples. ``dimensions``: position among the leaves -> the dimension that counts them."""
    position, dimension = next(iter(dimensions.items()))
    return int(pytree.tree_leaves(batch)[position].shape[dimension])


def split(batch: Any, count: int, dimensions: Mapping[int, int]) -> list[Any]:
    """Split a minibatch into ``count`` microbatches, or as many as it has samples: their sizes differ by at most one.

    Tensors are split along their dimension in ``dimensions``; every microbatch gets all other entries.
    """
    count = max(min(count, samples_in(batch, dimensions)), 1)
    if count == 1:
        return [batch]
    leaves, structure = pytree.tree_flatten(batch)
    pieces = [
        leaf.tensor_split(count, dimensions[position]) if position in dimensions else (leaf,) * count
        for position, leaf in enumerate(leaves)
    ]
    return [pytree.tree_unflatten([each[index] for each in pieces], structure) for index in range(count)]


def factors_of(
    samples: Sequence[int],
    divisors: Sequence[Sequence[float]] | None = None,
    whole: Sequence[float] | None = None,
    *,
    penalty: bool = False,
) -> tuple[list[float], bool]:
    """Return the factor of each microbatch's loss, and whether the terms of the loss ask for different ones.

    ``samples``: of each microbatch. ``divisors``: what each term of the loss divides by, for each microbatch, and for
    the ``whole`` minibatch; None if all are means over samples. ``penalty``: a term does not depend on the batch.
    """
    total = sum(samples)
    by_samples = [count / total for count in samples]
    terms = [
        [divisor[term] / divisor_of_all for divisor in divisors or ()]
        for term, divisor_of_all in enumerate(whole or ())
        if divisor_of_all
    ]
    if not terms:
        return by_samples, False
    difference = max(max(column) - min(column) for column in zip(*terms, strict=True))
    if penalty:
        difference = max(difference, *(abs(sum(term) - 1) for term in terms))
    if difference > SAME_FACTOR:
        return by_samples, True
    return by_samples if by_samples in terms else terms[0], False
