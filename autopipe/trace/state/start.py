"""``Start``: the Python state of a model to which each run of a capture returns, so that all make the same calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from autopipe.trace.state.observing.reach import roots
from autopipe.trace.state.snapshots.snapshot import Snapshot
from autopipe.workload import Workload


class Start:
    """The state of model, loss and the user's modules, and of the random generators in it."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        self._snapshot = Snapshot.of(roots(model, workload.functions()), compared=False)
        self._generators = [way for way in map(_way, self._snapshot.owners.values()) if way is not None]

    def restore(self) -> None:
        """Put everything back, but iterators and what libraries keep in C."""
        self._snapshot.restore()
        for put, state in self._generators:
            put(state)


def _way(owner: Any) -> tuple[Callable[[Any], Any], Any] | None:
    """Return what sets the state of a generator, and its state; None for anything else."""
    if isinstance(owner, random.Random):
        return owner.setstate, owner.getstate()
    if isinstance(owner, np.random.Generator):
        return lambda state: setattr(owner.bit_generator, "state", state), owner.bit_generator.state
    if isinstance(owner, np.random.RandomState):
        return owner.set_state, owner.get_state()
    if isinstance(owner, torch.Generator):
        return owner.set_state, owner.get_state()
    return None
