"""A private stream of random numbers for the user's data.

A shuffling DataLoader draws from the global generators, as does the training. The data gets a state of its own,
which is installed for each step of the iteration and removed after it. Its order is then the same on every rank,
independent of the rank's other draws, and the training's draws do not depend on the data.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from autopipe.draws import exclusive, generators_outside_torch_restored, random_states, set_random_states


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class PrivateRandom:
    """A state of torch's CPU generator, numpy's and random's, separate from the program's own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: tuple[torch.Tensor, Any, Any] | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Install the private state for the block, and restore the program's own after it."""
        with exclusive():
            outside = random_states()
            try:
                if self._state is None:
                    _seed(self._seed)
                else:
                    set_random_states(self._state)
                yield
            finally:
                self._state = random_states()
                set_random_states(outside)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every generator for a build. torch's keeps the state after the build; the others are restored."""
    with exclusive(), generators_outside_torch_restored():
        np.random.seed(seed % 2**32)
        random.seed(seed)
        torch.manual_seed(seed)
        yield
