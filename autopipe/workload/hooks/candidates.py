"""What a user's module has that may be its model or a hook, to suggest it in an error. Nothing is called."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterator
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

_HELD_OUT = re.compile(r"test|val|eval|dev_|_dev")
_DATA = re.compile(r"(?!.*(dataset|collate|model|weight|checkpoint|download))(?=.*(data|loader|batch))")
_LOSS = re.compile(r"loss|criterion")
_BUILDS = re.compile(r"(build|make|create|get|new|init)_.*(model|net)")
_SIZES = ("batch_size", "batchsize", "bs", "size")


def takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a callable takes ``count`` positional arguments; True if its signature cannot be read."""
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def required(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments without a default value; () if the signature cannot be read."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name for p in parameters if p.default is p.empty and p.kind not in kinds)


def data_name(module: ModuleType) -> str:
    """Return the name of what looks like training data, a DataLoader or a function of batches; "" without one."""
    names = [
        name
        for name, value in _public(module)
        if not _HELD_OUT.search(name.lower())
        and (
            isinstance(value, DataLoader)
            or (_is_own_function(value, module) and _DATA.match(name.lower()) and _gives_batches(value))
        )
    ]
    return min(names, key=lambda name: ("train" not in name.lower(), names.index(name)), default="")


def loss_name(module: ModuleType) -> str:
    """Return the name of what looks like the loss: a module or function of (output, target); "" without one."""
    for name, value in _public(module):
        if isinstance(value, nn.Module) and (_LOSS.search(name.lower()) or _is_loss_class(type(value))):
            return name
        if _is_own_function(value, module) and _LOSS.search(name.lower()) and len(required(value)) == 2:
            return name
    return ""


def model_name(module: ModuleType) -> str:
    """Return the name of a function or class that builds a model without arguments, or ""."""
    public = list(_public(module))
    for name, value in public:
        if _is_own_function(value, module) and _BUILDS.match(name.lower()) and not required(value):
            return name
    classes = [
        name
        for name, value in public
        if is_own_class(value, module, nn.Module) and not _is_loss_class(value) and takes(value, 0)
    ]
    return classes[-1] if classes else ""


def hook_name(name: str, part: str, module: ModuleType, called: Collection[str]) -> str:
    """Return the name of what resembles the optimizer or scheduler hook, and needs one argument as they do, or "".

    ``name``: of the hook. ``part``: a name with this part resembles it. ``called``: names of functions that hooks call.
    """
    own = [
        key
        for key, value in _public(module)
        if key not in called
        and (is_own_class(value, module, Optimizer) or (_is_own_function(value, module) and len(required(value)) == 1))
    ]
    similar = [key for key in own if part in key.lower()]
    similar += difflib.get_close_matches(name, own, n=1, cutoff=0.75)
    return similar[0] if similar else ""


def is_own_class(value: Any, module: ModuleType, base: type) -> bool:
    """Return whether a value is a subclass of ``base`` that the module defines."""
    return isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in list(vars(module).items()) if not name.startswith("_"))


def _is_own_function(value: Any, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__


def _gives_batches(function: Callable[..., Any]) -> bool:
    arguments = required(function)
    return not arguments or (len(arguments) == 1 and arguments[0].lower() in _SIZES)


def _is_loss_class(kind: type) -> bool:
    return kind.__name__.endswith("Loss")
