"""Which model of a script runs in stages: the outermost one that is called to train, and that something trains.

That is an optimizer with one of its parameters or, in scripts that write ``p.data.add_(p.grad, alpha=-lr)``, a backward
that has given its parameters gradients. Then its first call runs here, and later ones run in stages.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import Optimizer

from autopipe.script.refusals import name_of_object, script_place


class Choice:
    """What has been seen of models and optimizers so far."""

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.calls: Counter[int] = Counter()  # training calls of a model without an optimizer, by its id
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()  # of models that train
        self._calls: list[nn.Module] = []  # that have begun

    def optimizers_of(self, model: nn.Module) -> Iterator[Optimizer]:
        """Yield the optimizers that have a parameter of the model."""
        own = {id(parameter) for parameter in model.parameters()}
        for optimizer in list(self.optimizers):
            if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                yield optimizer

    def has_optimizer(self, model: nn.Module) -> bool:
        """Return whether an optimizer has a parameter of the model."""
        return next(self.optimizers_of(model), None) is not None

    def takes(self, module: nn.Module) -> bool:
        """Return whether this call makes the module the model of the script."""
        if not (module.training and torch.is_grad_enabled()):
            return False
        if self.has_optimizer(module):
            return True
        self._called.add(module)
        self.calls[id(module)] += 1
        return module in self._trained

    def enter(self, module: nn.Module) -> bool:
        """Note that a call of a module begins; return whether it is an outermost one. These get names if they train."""
        outermost = not self._calls
        if outermost and module not in self.names and module.training and torch.is_grad_enabled():
            title = name_of_object(module) or type(module).__name__
            self.names[module] = f"{title} ({script_place()})"
        self._calls.append(module)
        return outermost

    def leave(self) -> None:
        """Note that a call ends."""
        self._calls.pop()

    def name_of(self, optimizer: Optimizer) -> str:
        """Return the name of the model that an optimizer trains; "" if no call of one was seen."""
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for module, name in list(self.names.items()):
            if any(id(parameter) in trained for parameter in module.parameters()):
                return name
        return ""

    def by_hand(self, model: nn.Module) -> int:
        """Return the number of training calls up to this one of a model that no optimizer trains, else 0."""
        if not (model.training and torch.is_grad_enabled()) or self.has_optimizer(model):
            return 0
        self.calls[id(model)] += 1
        return self.calls[id(model)]

    def seen_backward(self) -> None:
        """Note which models a backward has given gradients."""
        if not self._trained:
            for module in list(self._called):
                if any(parameter.grad is not None for parameter in module.parameters()):
                    self._trained.add(module)
