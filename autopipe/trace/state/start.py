"""``Start``: the Python state of a model to which each run of a capture returns, so that all make the same calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from autopipe.trace.record.caches import users_namespaces
from autopipe.trace.state.observing.reach import modules
from autopipe.trace.state.snapshots.snapshot import Snapshot
from autopipe.workload import Workload


class Start:
    """The state of model, loss and the user's modules, and of the random generators in it."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        functions = workload.functions()
        names = {module.__name__ for module in users_namespaces(model)}
        names |= {getattr(function, "__module__", None) or "" for function in functions.values()}
        roots = [("model", model), *(("loss", functions[name]) for name in functions if name == "loss")]
        self._snapshot = Snapshot.of([*roots, *modules(names)], compared=False)
        self._generators = [
            (put, state)
            for owner in self._snapshot.owners.values()
            if (way := _way(owner)) is not None
            for put, state in [way]
        ]

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
