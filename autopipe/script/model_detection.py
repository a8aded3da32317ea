"""Which model of a script runs in stages: the outermost one that is called to train, and that something trains.

That is an optimizer with one of its parameters or, in scripts that write ``p.data.add_(p.grad, alpha=-lr)``, a backward
that has given its parameters gradients. Then its first call runs here, and later ones run in stages. Two models that
one backward trains, as in a GAN, are refused.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from autopipe.script.refusals import RefusedError, name_of_object, script_place
from autopipe.script.state.remote import is_remote

REMEDY = "run it with python: models that are trained through one another cannot run in stages yet"


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


def leaves_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that a backward from these tensors reaches."""
    leaves: list[Tensor] = []
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        function: Any = waiting.pop()
        if hasattr(function, "variable"):
            leaves.append(function.variable)
        for following, _ in function.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return leaves


def names_of(choice: Choice, model: nn.Module, others: Iterable[Tensor]) -> str:
    """Return the names of the model and of another one that has one of the tensors; "" without another one."""
    ids = {id(other) for other in others}
    for module, name in list(choice.names.items()):
        if module is not model and any(id(parameter) in ids for parameter in module.parameters()):
            return f"{choice.names[model]} and {name} are trained together"
    return ""


def explain(error: RefusedError, choice: Choice, model: nn.Module, called: nn.Module, values: Any) -> None:
    """Name both models in an error that a call has raised. ``called``: that module, ``values``: its arguments."""
    if called is model:
        others = leaves_of(value for value in pytree.tree_leaves(values) if type(value) is Tensor)
    else:
        others = [p for p in called.parameters() if p.requires_grad and not is_remote(p)]
    names = names_of(choice, model, others)
    if names and names not in error.what:
        error.what = f"autopipe run: {names}: {error.what.removeprefix('autopipe run: ')}"
        error.remedy = REMEDY
