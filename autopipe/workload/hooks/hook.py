"""Hooks: functions that a model file may define besides the model, each also an option that takes a TARGET.

=================  ====================================  ===============================================
hook               signature                             without it
=================  ====================================  ===============================================
example_inputs     (batch_size) -> tuple or dict         the first batch of ``data``
loss               (output, target) -> scalar[, weight]  ``output.loss``, ``output["loss"]``, a scalar
data               (batch_size) or () -> iterable        synthetic batches from ``example_inputs``
optimizer          (named_parameters) -> Optimizer       AdamW
scheduler          (optimizer) -> LRScheduler            none
after_step         (named_parameters, step)              nothing happens after a step
evaluate_data      as ``data``                           none
split              (batch, parts) -> list of batches     cut along the samples
on_step            (step, metrics)                       nothing is called
on_evaluate        (step, metrics)                       nothing is called
=================  ====================================  ===============================================

The last two observe a run: only the command calls them, and no rank does.

``own_loss`` handles a loss that is a module with parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from autopipe.errors import ModelFileError, unknown_choice, with_article
from autopipe.workload.hooks import candidates
from autopipe.workload.hooks.candidates import takes
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
OBSERVERS = dict.fromkeys(("on_step", "on_evaluate"), '(step, metrics) -> None or "stop"')
_DATA = {"data": "--data", "evaluate_data": "--eval-data"}  # hooks that give batches, and their options
_ARGUMENTS = {"example_inputs": 1, "loss": 2, "optimizer": 1, "scheduler": 1, "after_step": 2}
_ARGUMENTS |= dict.fromkeys(OBSERVERS, 2)


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook of the user."""

    name: str
    function: Any  # is called; or iterated, if it is an iterable of data
    origin: str  # human-readable: the file or TARGET that defines it
    path: str  # of the file, for errors
    from_class: bool = False  # whether ``function`` is an instance of the class that the user named

    @property
    def label(self) -> str:
        """The human-readable name: ``data of gpt.py``."""
        return f"{self.name} of {self.origin}"

    @property
    def place(self) -> str:
        """The definition: ``file:line in name``, or its file."""
        try:
            function = inspect.unwrap(self.function)
            path, line = inspect.getsourcefile(function), inspect.getsourcelines(function)[1]
        except (TypeError, OSError):
            return self.path
        return f"{path}:{line} in {getattr(function, '__name__', self.name)}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook. Its exceptions become a ModelFileError with the user's line."""
        with users_code(self.label, self.path):
            return self.function(*args, **kwargs)

    @property
    def takes_batch_size(self) -> bool:
        """Whether a data hook takes a batch size: it has a parameter of that name, or one required argument."""
        return callable(self.function) and (_names_batch_size(self.function) or self.needs_batch_size)

    def source(self, batch_size: int | None) -> Any:
        """Return the iterable of a data hook. Its exceptions propagate unchanged."""
        if not callable(self.function):
            return self.function
        if batch_size is None:
            return self.function()
        if _names_batch_size(self.function):
            return self.function(batch_size=batch_size)
        return self.function(batch_size)

    @property
    def names_batch_size(self) -> bool:
        """Whether a data hook has a parameter named ``batch_size``."""
        return callable(self.function) and _names_batch_size(self.function)

    @property
    def needs_batch_size(self) -> bool:
        """Whether a data hook requires a batch size."""
        return callable(self.function) and not takes(self.function, 0)


def _names_batch_size(function: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(function).parameters.get("batch_size")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind is not parameter.POSITIONAL_ONLY


def find_hooks(
    module: ModuleType, label: str, options: Mapping[str, str], without: Sequence[str] = ()
) -> dict[str, Hook]:
    """Return the hooks of a model file; an option replaces the hook of its name.

    ``without``: hooks of the file to ignore, because another option of the command line replaces them.

    Raises: ModelFileError for an unknown hook, one that does not exist, and one of the wrong signature.
    """
    for name in options:
        if name not in HOOKS:
            raise ModelFileError(unknown_choice("hook", name, HOOKS))
    hooks = {}
    for name in HOOKS:
        if name in options:
            hooks[name] = _from_option(name, options[name], module, label)
        elif name not in without and vars(module).get(name) is not None:
            path = getattr(module, "__file__", None) or ""
            value = vars(module)[name]
            instance = _instance(value, name, label, path)
            hooks[name] = _checked(Hook(name, instance, label, path, instance is not value), module)
    if _is_split(vars(module).get("split"), module.__name__):
        hooks["split"] = Hook("split", vars(module)["split"], label, getattr(module, "__file__", None) or "")
    return hooks


def find_observers(module: ModuleType, label: str, given: Mapping[str, str | Callable[..., Any]]) -> dict[str, Hook]:
    """Return the hooks that observe a run; ``given``: TARGET texts or functions that replace those of the file.

    Raises: ModelFileError for one that does not exist or has another signature.
    """
    path = getattr(module, "__file__", None) or ""
    hooks = {}
    for name in OBSERVERS:
        value = given.get(name)
        if isinstance(value, str):
            hooks[name] = _from_option(name, value, module, label)
        elif value is not None:
            code = getattr(value, "__code__", None)
            own = "" if code is None else code.co_filename
            hooks[name] = _checked(Hook(name, value, getattr(value, "__qualname__", type(value).__name__), own))
        elif vars(module).get(name) is not None:
            hooks[name] = _checked(Hook(name, vars(module)[name], label, path))
    return hooks


def _is_split(value: Any, module: str) -> bool:
    """Return whether ``split`` of a file is the hook: a function ``split(batch, parts)`` of that file.

    Scripts have other functions of that name, such as one that separates training from validation data.
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
    return _checked(Hook(name, instance, text.lstrip(":"), path, instance is not value), module)


def _instance(value: Any, name: str, label: str, path: str) -> Any:
    """Return an instance if the value is a class (``torch.nn:CrossEntropyLoss``), except for optimizers."""
    if not isinstance(value, type) or (name == "optimizer" and issubclass(value, torch.optim.Optimizer)):
        return value
    if name in _DATA and _gives_samples(value):
        return value  # refused below, also if it needs arguments
    with users_code(f"{name} of {label}: instantiating {with_article(value.__name__)}", path):
        return value()


def _checked(hook: Hook, module: ModuleType | None = None) -> Hook:
    """Return a hook that can be called or iterated as its name requires. ``module``: where it is defined, for errors.

    Raises: ModelFileError with what is expected instead.
    """
    if hook.name in _DATA and _gives_samples(hook.function):
        raise _wrong(
            hook,
            f"is {with_article(_kind(hook.function).__name__)}, a dataset of samples; expected batches",
            f"define loader = DataLoader(dataset, batch_size=32), or a function that returns it, and give "
            f"{_DATA[hook.name]} {hook.origin.rpartition(':')[0]}:loader",
        )
    value, wanted = hook.function, f"expected {hook.name}{(HOOKS | OBSERVERS)[hook.name]}"
    if not callable(value):
        if hook.name in _DATA and hasattr(value, "__iter__") and not isinstance(value, (str, bytes)):
            if isinstance(value, Iterator):
                raise _wrong(hook, "is an iterator, which can be read only once", f"{wanted}, or a DataLoader")
            return hook
        if hook.name == "loss" and isinstance(value, torch.Tensor):
            known = candidates.loss_name(module) if module is not None else ""
            raise _wrong(
                hook,
                "is a Tensor, a value that the loop of the script computes",
                f"name the function that computes it: --loss :{known or 'NAME'}; or define loss(output, target)",
            )
        raise _wrong(hook, f"is {with_article(type(value).__name__)}", wanted + _alternative(hook))
    if hook.name in _ARGUMENTS:
        if not takes(value, _ARGUMENTS[hook.name]):
            raise _wrong(hook, f"cannot be called with {_ARGUMENTS[hook.name]} argument(s)", wanted)
    elif not takes(value, 0) and not takes(value, 1):
        raise _wrong(hook, "must take no argument or the batch size, and takes neither", wanted)
    return hook


def _gives_samples(value: Any) -> bool:
    """Return whether a value is a map-style dataset, or a class of them: neither iterable nor callable."""
    names = {name for base in _kind(value).__mro__ for name in vars(base)}
    return "__getitem__" in names and not names & {"__iter__", "__call__"}


def _kind(value: Any) -> type:
    return value if isinstance(value, type) else type(value)


def _alternative(hook: Hook) -> str:
    """Return a remedy for a script that uses the name of a hook for something else."""
    value = hook.function
    if isinstance(value, torch.optim.Optimizer):
        rate = value.param_groups[0].get("lr", 1e-3)
        return (
            ", a function, because every stage creates its own; "
            f"or --optimizer {type(value).__name__.lower()} --lr {float(rate):g}"
        )
    if hook.name == "scheduler":
        return ", a function, because every stage creates its own; or rename the one of the script"
    if hook.name == "loss":
        return "; or name the function in the file that computes the loss: --loss :NAME"
    return ""


def _wrong(hook: Hook, problem: str, remedy: str) -> ModelFileError:
    where = hook.path
    code = getattr(hook.function, "__code__", None)
    if code is not None:
        where = f"{code.co_filename}:{code.co_firstlineno}"
    return ModelFileError(f"{hook.label} {problem}", where=where, remedy=remedy)
