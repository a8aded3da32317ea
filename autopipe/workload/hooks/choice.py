"""Which optimizer and scheduler train, in words, and functions of the model file that resemble these hooks by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from torch.optim import Optimizer

from autopipe.ir.profile import WorkloadSpec
from autopipe.workload.hooks.candidates import hook_name
from autopipe.workload.hooks.hook import Hook
from autopipe.workload.target.targets import elsewhere

_PARTS = {"optimizer": "optim", "scheduler": "schedul"}  # a name with this part resembles that hook


@dataclass(frozen=True, slots=True)
class Choice:
    """The optimizer and the scheduler of a workload."""

    names: str  # ``AdamW, lr 0.001``; ``net.py:optimizer; scheduler: net.py:scheduler``
    default: str = ""  # why the default optimizer is used; "" if the user chose one
    hint: str = ""  # about an unused function that resembles the scheduler hook; "" without one

    @property
    def note(self) -> str:
        """The choice as a note for the user."""
        default = f" ({self.default})" if self.default else ""
        return f"optimizer: {self.names}{default}{f'; {self.hint}' if self.hint else ''}"


def choice_of(
    module: ModuleType, label: str, spec: WorkloadSpec, hooks: Mapping[str, Hook], fallback: type[Optimizer]
) -> Choice:
    """Return the choice of a workload. ``fallback``: the class that is used without an optimizer hook."""
    default = hint = ""
    if "optimizer" in hooks:
        names, rate = _place("optimizer", label, spec.hooks), spec.lr
    else:
        names, rate = fallback.__name__, spec.lr
        if rate is None:
            rate = _usual_rate(fallback)
        if not spec.optimizer:
            near = _resembling("optimizer", module, hooks)
            default = f"{label} has no `optimizer`"
            default += f"; did you mean {near}? give --optimizer :{near}" if near else ""
    if rate is not None:
        names += f", lr {rate:g}"
    if "scheduler" in hooks:
        names += f"; scheduler: {_place('scheduler', label, spec.hooks)}"
    elif near := _resembling("scheduler", module, hooks):
        hint = f"no scheduler (did you mean {near}? name it `scheduler`)"
    return Choice(names, default, hint)


def _place(name: str, label: str, options: Mapping[str, str]) -> str:
    """Return the file and the name of a hook, without folders. ``options``: the TARGET of each hook that has one."""
    text = options.get(name, f":{name}")
    target = elsewhere(text)
    return f"{label}{text}" if target is None else f"{target.label}:{target.attribute or name}"


def _usual_rate(kind: type[Optimizer]) -> float | None:
    """Return the default learning rate of an optimizer of torch; None if it has none that is a number."""
    parameter = inspect.signature(kind).parameters.get("lr")
    rate = None if parameter is None else parameter.default
    return float(rate) if isinstance(rate, (int, float)) else None


def _resembling(name: str, module: ModuleType, hooks: Mapping[str, Hook]) -> str:
    """Return a function of the file whose name resembles that of a hook, and that no hook calls; "" without one."""
    called: set[str] = set()
    for hook in hooks.values():
        called.update(getattr(getattr(hook.function, "__code__", None), "co_names", ()))
    return hook_name(name, _PARTS[name], module, called)
