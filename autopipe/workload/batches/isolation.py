"""A private stream of random numbers for the user's data.

A shuffling DataLoader draws from the global generators, as does the training. Here the data gets its own state, which
is put in place around each step of the iteration and taken out behind it: the same order on every rank, whatever else
the rank draws, and no trace of it in the training's draws.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from autopipe.draws import exclusive


def _take() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _put(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class PrivateRandom:
    """The state of torch's CPU generator, numpy's and random's, kept apart from the program's own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: tuple[Any, ...] | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Put the private state in place; take it out again behind the block, whatever happens in it."""
        with exclusive():
            outside = _take()
            try:
                if self._state is None:
                    _seed(self._seed)
                else:
                    _put(self._state)
                yield
            finally:
                self._state = _take()
                _put(outside)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every generator for a build. torch's is left as the build leaves it; the others are put back."""
    with exclusive():
        numpy_state, random_state = np.random.get_state(), random.getstate()
        np.random.seed(seed % 2**32)
        random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(random_state)
