"""Hooks: what a model file may define beside the model, each also an option of TARGET syntax.

=================  ====================================  ===============================================
hook               signature                             without it
=================  ====================================  ===============================================
example_inputs     (batch_size) -> tuple or dict         the first batch of ``data``
loss               (output, target) -> scalar[, weight]  ``output.loss``, ``output["loss"]``, a scalar
data               (batch_size) or () -> iterable        synthetic batches from ``example_inputs``
optimizer          (named_parameters) -> Optimizer       AdamW
scheduler          (optimizer) -> LRScheduler            none
after_step         (named_parameters, step)              nothing is done after a step
evaluate_data      as ``data``                           none
split              (batch, parts) -> list of batches     cut along the samples
=================  ====================================  ===============================================

A loss that is a module with parameters: see ``own_loss``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopipe.errors import ModelFileError, unknown_choice, with_article
from autopipe.workload.target.targets import Target, import_target, look_up, users_code

HOOKS = {
    "example_inputs": "(batch_size) -> tuple or dict",
    "loss": "(output, target) -> scalar, or (scalar, weight)",
    "data": "(batch_size) or () -> iterable of (inputs, target) or dict",
    "optimizer": "(named_parameters) -> torch.optim.Optimizer",
    "scheduler": "(optimizer) -> LRScheduler",
    "after_step": "(named_parameters, step) -> None",
    "evaluate_data": "(batch_size) or () -> iterable of (inputs, target) or dict",
}
_ARGUMENTS = {"example_inputs": 1, "loss": 2, "optimizer": 1, "scheduler": 1, "after_step": 2}


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook: ``function`` is what is called (or iterated, where it is no function), ``path`` its file.

    ``from_class``: ``function`` is an instance of the class that the user has named.
    """

    name: str
    function: Any
    origin: str
    path: str
    from_class: bool = False

    @property
    def label(self) -> str:
        """The hook for people: ``data of gpt.py``."""
        return f"{self.name} of {self.origin}"

    @property
    def place(self) -> str:
        """Where it is defined: ``file:line in name``, or its file."""
        try:
            function = inspect.unwrap(self.function)
            path, line = inspect.getsourcefile(function), inspect.getsourcelines(function)[1]
        except (TypeError, OSError):
            return self.path
        return f"{path}:{line} in {getattr(function, '__name__', self.name)}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; what it raises becomes a ModelFileError with the user's line."""
        with users_code(self.label, self.path):
            return self.function(*args, **kwargs)

    @property
    def takes_batch_size(self) -> bool:
        """Whether a data hook can be given a batch size: it names it, or cannot do without its first argument."""
        return callable(self.function) and (_names_batch_size(self.function) or self.needs_batch_size)

    def source(self, batch_size: int | None) -> Any:
        """Return what a data hook iterates; call it outside of ``__call__``'s care."""
        if not callable(self.function):
            return self.function
        if batch_size is None:
            return self.function()
        if _names_batch_size(self.function):
            return self.function(batch_size=batch_size)
        return self.function(batch_size)

    @property
    def names_batch_size(self) -> bool:
        """Whether a data hook takes the batch size by its name."""
        return callable(self.function) and _names_batch_size(self.function)

    @property
    def needs_batch_size(self) -> bool:
        """Whether a data hook must be given a batch size."""
        return callable(self.function) and not takes(self.function, 0)


def _names_batch_size(function: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(function).parameters.get("batch_size")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind is not parameter.POSITIONAL_ONLY


def takes(function: Callable[..., Any], count: int) -> bool:
    """Tell whether a callable can be called with ``count`` positional arguments. What cannot be read is believed."""
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


def find_hooks(
    module: ModuleType, label: str, options: Mapping[str, str], without: Sequence[str] = ()
) -> dict[str, Hook]:
    """Return the hooks of a model file, each replaced by its option where one is given.

    ``without``: what the command line says in another way, so that the file is not asked.

    Raises: ModelFileError for an unknown hook, one that is not there, and one of the wrong shape.
    """
    for name in options:
        if name not in HOOKS:
            raise ModelFileError(unknown_choice("hook", name, HOOKS))
    found = {}
    for name in HOOKS:
        if name in options:
            found[name] = _from_option(name, options[name], module, label)
        elif name not in without and vars(module).get(name) is not None:
            path = getattr(module, "__file__", None) or ""
            value = vars(module)[name]
            instance = _instance(value, name, label, path)
            found[name] = _checked(Hook(name, instance, label, path, instance is not value))
    if _is_split(vars(module).get("split"), module.__name__):
        found["split"] = Hook("split", vars(module)["split"], label, getattr(module, "__file__", None) or "")
    return found


def _is_split(value: Any, module: str) -> bool:
    """Tell whether the name ``split`` of a file stands for the hook: a function ``split(batch, parts)`` of that file.

    Scripts have other functions of that name, such as one that parts training from validation data.
    """
    if not inspect.isfunction(value) or value.__module__ != module:
        return False
    return list(inspect.signature(value).parameters)[:2] == ["batch", "parts"]


def _from_option(name: str, text: str, model_module: ModuleType, model_label: str) -> Hook:
    if text.startswith(":"):
        target, module, label = Target(model_label, text[1:]), model_module, model_label
    else:
        target = Target.parse(text)
        module, label = import_target(target), target.label
    path = getattr(module, "__file__", None) or ""
    value = look_up(module, target.attribute or name, label)
    instance = _instance(value, name, label, path)
    return _checked(Hook(name, instance, text.lstrip(":"), path, instance is not value))


def _instance(value: Any, name: str, label: str, path: str) -> Any:
    """Make an instance where a class is given (``torch.nn:CrossEntropyLoss``), but for classes of optimizers."""
    if not isinstance(value, type) or (name == "optimizer" and issubclass(value, torch.optim.Optimizer)):
        return value
    with users_code(f"{name} of {label}: making {with_article(value.__name__)}", path):
        return value()


def _checked(hook: Hook) -> Hook:
    value, wanted = hook.function, f"wanted {hook.name}{HOOKS[hook.name]}"
    if not callable(value):
        if (
            hook.name in ("data", "evaluate_data")
            and hasattr(value, "__iter__")
            and not isinstance(value, (str, bytes))
        ):
            if isinstance(value, Iterator):
                raise _wrong(hook, "is an iterator, which can be read only once", f"{wanted}, or a DataLoader")
            return hook
        raise _wrong(hook, f"is {with_article(type(value).__name__)}", wanted + _other_way(hook))
    if hook.name in _ARGUMENTS:
        if not takes(value, _ARGUMENTS[hook.name]):
            raise _wrong(hook, f"cannot be called with {_ARGUMENTS[hook.name]} argument(s)", wanted)
    elif not takes(value, 0) and not takes(value, 1):
        raise _wrong(hook, "can be called neither with a batch size nor without", wanted)
    return hook


def _other_way(hook: Hook) -> str:
    """Say what helps where a script has something else under the name of a hook."""
    value = hook.function
    if isinstance(value, torch.optim.Optimizer):
        rate = value.param_groups[0].get("lr", 1e-3)
        return (
            ", a function, since every stage makes its own; "
            f"or --optimizer {type(value).__name__.lower()} --lr {float(rate):g}"
        )
    if hook.name == "scheduler":
        return ", a function, since every stage makes its own; or give the script's own another name"
    if hook.name == "loss":
        return "; or name the function in the file that is the loss: --loss :criterion"
    return ""


def _wrong(hook: Hook, problem: str, remedy: str) -> ModelFileError:
    where = hook.path
    code = getattr(hook.function, "__code__", None)
    if code is not None:
        where = f"{code.co_filename}:{code.co_firstlineno}"
    return ModelFileError(f"{hook.label} {problem}", where=where, remedy=remedy)
