"""Hooks of the backward pass of a module that is split: stages do not run them, so they must leave gradients alone."""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from autopipe.errors import TraceError
from autopipe.trace.explain import short_path
from autopipe.trace.record.recorder import Recorder

# what a lambda may call last, because it returns nothing
_RETURN_NOTHING = {"append", "appendleft", "extend", "update", "print", "debug", "info", "warning", "log", "put"}


# the methods of nn.Module that list its hooks for a call
GETTERS = ("_get_backward_hooks", "_get_backward_pre_hooks")


def refusing(recorder: Recorder, getter: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """Return a method that lists the hooks of a module, and refuses what may change a gradient while it is recorded."""

    def hooks_of(module: nn.Module) -> Any:
        hooks = getter(module)
        if recorder.listening and torch.is_grad_enabled():
            each = itertools.chain(*hooks) if isinstance(hooks, tuple) else hooks
            refuse_changing(module, each)
        return hooks

    return hooks_of


def refuse_changing(module: nn.Module, hooks: Iterable[Any]) -> None:
    """Raise TraceError for the first hook whose code may change a gradient."""
    for hook in hooks:
        code = code_of(hook)
        if code is not None and _returns_nothing(code) and not _works_in_place(code):
            continue
        place = "" if code is None else f"{short_path(code.co_filename)}:{code.co_firstlineno}"
        name = getattr(hook, "__qualname__", type(hook).__qualname__).rpartition("<locals>.")[2]
        raise TraceError(
            f"the backward hook {name} of {type(module).__name__} may change gradients, and stages do not run the "
            "hooks of a module that is split",
            where=place,
            remedy="change the gradient in a torch.autograd.Function in the forward, or register the hook on a "
            "parameter or on a layer of torch.nn; a hook that only observes returns nothing",
        )


def code_of(hook: Any) -> Any:
    """Return the code of a hook without its decorators, None if it is not a function in Python."""
    hook = inspect.unwrap(hook)
    while not hasattr(hook, "__code__"):
        inner = getattr(hook, "func", getattr(hook, "__func__", None))
        if inner is None:
            inner = getattr(type(hook).__call__, "__code__", None) and type(hook).__call__
        if inner is None:
            return None
        hook = inspect.unwrap(inner)
    return hook.__code__


def _returns_nothing(code: Any) -> bool:
    """Return whether every return of a function gives None, or if it is a lambda, what it calls does."""
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return False
        if instruction.opname == "RETURN_VALUE":
            constant = before is not None and before.opname == "LOAD_CONST" and before.argval is None
            if not constant and not (code.co_name == "<lambda>" and _called_first(code) in _RETURN_NOTHING):
                return False
        before = instruction
    return True


def _called_first(code: Any) -> str:
    """Return the function that a lambda evaluates first: of one call, the function that is called last."""
    name = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_DEREF"):
            name = str(instruction.argval)
        elif name and instruction.opname not in ("PUSH_NULL", "PRECALL", "CACHE"):
            break
    return name


def _works_in_place(code: Any) -> bool:
    """Return whether a method that changes its tensor is called on an argument or a local variable.

    A hook may keep tensors of its own: an average in a global, in the function around it or in an attribute of self.
    """
    base = ""
    for instruction in dis.get_instructions(code):
        name = str(instruction.argval)
        if instruction.opname.startswith("LOAD_FAST"):
            base = name
        elif instruction.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"):
            base = ""
        elif instruction.opname == "LOAD_METHOD" or (
            instruction.opname == "LOAD_ATTR" and "NULL|self" in instruction.argrepr
        ):
            in_place = name.endswith("_") and not name.endswith("__")
            if in_place and base not in ("", "self"):
                return True
    return False
