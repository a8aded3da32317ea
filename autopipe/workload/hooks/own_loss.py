"""The user's loss hook, which is called with (output, target), and its own parameters.

A loss that is an ``nn.Module`` with parameters (uncertainty weighting, ArcFace, a learnable temperature) becomes one
more child of the model, so that its parameters are trained, cut, saved and exported like the model's, under names that
begin with ``loss.``. So does one with buffers that it may change (the center of DINO), which checkpoints contain and
exports do not, unless it has parameters, too. While the model runs, the child is removed: a forward that iterates over
its children, as that of ``nn.Sequential``, sees only the model.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopipe.errors import ModelFileError, with_article
from autopipe.workload.hooks.hook import Hook
from autopipe.workload.target.targets import users_code

# names of the child: the first one that the model does not have
_NAMES = ("loss", "loss_hook", "autopipe_loss")


class OwnLoss:
    """The loss hook of a workload."""

    def __init__(self, hook: Hook | None) -> None:
        self.hook = hook  # None if the output of the model carries the loss
        self._copies: dict[torch.device, nn.Module] = {}
        self.child = ""  # its name, if it is a child of the model

    @property
    def prefix(self) -> str:
        """The prefix of the names of the loss's parameters after a build; "" if it has none."""
        return f"{self.child}." if self.child and self._has_parameters else ""

    def among(self, names: Iterable[str]) -> frozenset[str]:
        """Return the parameter names of a model that belong to the loss."""
        if not self._has_parameters:
            return frozenset()
        names = list(names)
        # the model has a child of each name before the one in use
        used = [name for name in _NAMES if any(other.startswith(f"{name}.") for other in names)][-1:]
        return frozenset(other for other in names for name in used if other.startswith(f"{name}."))

    def attach(self, model: nn.Module, original: nn.Module | None = None) -> None:
        """Add the loss to a new model as a child, if the loss has parameters, or buffers that it may change.

        A class is instantiated now, so that its initial weights are drawn after the model's, as in a script that
        creates the loss after the model. An instance is copied. ``original``: the module that ``model`` is a copy of.

        Raises: ModelFileError if the user's code fails, or the loss and the model share a parameter.
        """
        hook, module = self.hook, self._module
        if hook is None or module is None or not (self._has_parameters or _may_change_buffers(module)):
            return
        if hook.from_class:
            with users_code(f"{hook.label}: instantiating {with_article(type(module).__name__)}", hook.path):
                module = type(module)()
        else:
            self._refuse_shared(module, model if original is None else original)
            module = copy.deepcopy(module)
        if not self._has_parameters:
            for part in module.modules():
                part._non_persistent_buffers_set.update(part._buffers)
        self.child = next(name for name in _NAMES if not hasattr(model, name))
        model._modules[self.child] = module

    def _refuse_shared(self, module: nn.Module, model: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, parameter in module.named_parameters():
            if id(parameter) in names:
                assert self.hook is not None
                raise ModelFileError(
                    f"the loss and the model share a parameter: {name} of the loss is {names[id(parameter)]}",
                    where=self.hook.place,
                    remedy="use it only in the forward of the model, and return the values that the loss needs with "
                    "the output; every build of the model gets a copy of the loss",
                )

    @contextlib.contextmanager
    def detached(self, model: nn.Module) -> Iterator[None]:
        """Remove the child from the model within the block."""
        child = model._modules.pop(self.child, None) if self.child else None
        try:
            yield
        finally:
            if child is not None:
                model._modules[self.child] = child

    def copied(self, model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
        """Return the user's instance, and its copy in a model; None if the model has none."""
        if self.hook is None or self._module is None or self.hook.from_class or not self.child:
            return None
        return self._module, model.get_submodule(self.child)

    def function(self, model: nn.Module, output: Any) -> Any:
        """Return the function to call with (output, target).

        A module of torch with class weights is copied once to the device of the output.
        """
        assert self.hook is not None
        if self.child:
            return model._modules[self.child]
        function = self.hook.function
        buffers = [] if self._module is None else list(self._module.buffers())
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)] if buffers else []
        if not tensors or all(buffer.device == tensors[0].device for buffer in buffers):
            return function
        device = tensors[0].device
        if device not in self._copies:
            self._copies[device] = copy.deepcopy(function).to(device)
        return self._copies[device]

    @property
    def is_trained(self) -> bool:
        """Whether the loss has parameters that the optimizer gets with the model's."""
        return self._module is not None and any(entry.requires_grad for entry in self._module.parameters())

    @property
    def _module(self) -> nn.Module | None:
        function = None if self.hook is None else self.hook.function
        return function if isinstance(function, nn.Module) else None

    @property
    def _has_parameters(self) -> bool:
        return self._module is not None and next(self._module.parameters(), None) is not None


def _may_change_buffers(module: nn.Module) -> bool:
    """Return whether a module has buffers that a forward may change. The losses of torch only read theirs."""
    return any(part._buffers and type(part).__module__ != "torch.nn.modules.loss" for part in module.modules())
