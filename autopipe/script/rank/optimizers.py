"""The copies of the script's optimizers on one rank. Each steps the parameters of the rank, and skips all others."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.script.rank.stages import RankStages


class RankOptimizers:
    """Optimizers by number. A parameter of another rank is an empty one, whose gradient is None: torch skips it."""

    def __init__(self, stages: RankStages) -> None:
        self.stages = stages
        self.optimizers: dict[int, torch.optim.Optimizer] = {}

    def make(self, number: int, kind: type[torch.optim.Optimizer], defaults: Any, groups: Any, state: Any) -> None:
        """Make an optimizer as a restored one: groups with the names of their parameters, and its state by name."""
        optimizer = kind.__new__(kind)
        own = [{**group, "params": [self._parameter(name) for name in group["params"]]} for group in groups]
        states: Any = defaultdict(dict)
        for name, values in state.items():
            if name in self.stages.owned:
                states[self._parameter(name)] = dict(values)
        optimizer.__setstate__({"defaults": defaults, "state": states, "param_groups": own})
        self.optimizers[number] = optimizer

    def forget(self, number: int) -> None:
        """Drop an optimizer and its state."""
        del self.optimizers[number]

    def _parameter(self, name: str) -> Tensor:
        if name in self.stages.owned:
            return self.stages.tensors[name]
        return nn.Parameter(torch.empty(0, device=self.stages.device))

    def step(self, number: int, groups: Any, scaling: dict[str, Any]) -> None:
        """Step with new options of the groups. ``scaling``: attributes for this step alone."""
        optimizer = self.optimizers[number]
        for own, given in zip(optimizer.param_groups, groups, strict=True):
            own.update(given)
        vars(optimizer).update(scaling)
        optimizer.step()
        for name in scaling:
            delattr(optimizer, name)

    def states(self, number: int) -> dict[str, dict[str, Any]]:
        """Return the state of the parameters of this rank, by name."""
        names = {id(self.stages.tensors[name]): name for name in self.stages.owned}
        state = self.optimizers[number].state
        return {names[id(parameter)]: dict(values) for parameter, values in state.items() if id(parameter) in names}

    def write_states(self, number: int, state: dict[str, dict[str, Any] | None]) -> None:
        """Replace the state of parameters; None removes it."""
        own = self.optimizers[number].state
        for name, values in state.items():
            if name not in self.stages.owned:
                continue
            parameter = self.stages.tensors[name]
            if values is None:
                own.pop(parameter, None)
            else:
                own[parameter] = dict(values)
