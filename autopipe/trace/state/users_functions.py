"""What functions of the user may read or change, from the names and instructions in their code.

An optimizer, a scheduler or ``after_step`` runs in the ranks, without data, forward and loss. ``reading_hook`` finds
one that reads what those change, ``setting_hook`` one that may set what those read, as far as names in code tell.
``is_closed`` and ``may_change`` are certain about code that they call closed, and that they say changes nothing.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from autopipe.trace.explain import place
from autopipe.trace.state.observing.bytecode import rebinds, with_inner
from autopipe.trace.state.snapshots.fingerprints import PLAIN
from autopipe.users_code import is_own_class, is_own_module, is_package
from autopipe.workload import Workload

_ASSIGNING = frozenset(("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL"))
_FILLING = frozenset((
    "add", "append", "appendleft", "clear", "extend", "fill", "insert", "pop", "popitem", "popleft", "remove",
    "reverse", "setdefault", "sort", "update",
))  # fmt: skip
_LOOKING_UP = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF")
_OPENING = ("STORE_GLOBAL", "DELETE_GLOBAL", "DELETE_ATTR", "IMPORT_NAME")
_REACHING = ("open", "exec", "eval", "globals", "vars", "setattr", "delattr", "input", "__import__")
_CONTAINERS = (list, dict, set, bytearray, deque, np.ndarray, Tensor)
_OF_TENSORS = frozenset(("data", "grad", "requires_grad"))
_CONSTRUCTORS = frozenset(("__new__", "__init__", "__post_init__"))
_OPEN = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, Tensor, functools._lru_cache_wrapper)
_HOOKS = ("after_step", "optimizer", "scheduler")


def reading_hook(workload: Workload, scheduler: Any, written: Mapping[str, str], *, varies: bool) -> str:
    """Return what the functions of the ranks read that data, forward or loss change; "" if nothing.

    ``scheduler``: of the workload, or None. ``written``: names of what changes, each with a readable path. ``varies``:
    the model does; otherwise, the functions of an optimizer are not looked at.
    """
    hooks = workload.functions()
    named = [(f"the {name} hook", hooks[name]) for name in _HOOKS if name in hooks and (varies or name != "optimizer")]
    for who, function in (*named, *_of_scheduler(scheduler)):
        for code, _ in _codes(function):
            for instruction in dis.get_instructions(code):
                name = instruction.argval
                if instruction.opname in _LOOKING_UP and name in written:
                    line = place(code.co_filename, (instruction.positions and instruction.positions.lineno) or 0)
                    return f"{who} reads {written[name]}, which data, forward or loss set ({line})"
    return ""


def setting_hook(workload: Workload, model: nn.Module, scheduler: Any) -> str:
    """Return the ``after_step`` or scheduler's function that may set what data, forward or loss read; "" if none."""
    hooks = workload.functions()
    readers = [*(hooks[name] for name in hooks if name not in _HOOKS), *{type(module) for module in model.modules()}]
    names: set[str] = set()
    setting = [("the after_step hook", hooks[name]) for name in hooks if name == "after_step"]
    for who, function in (*setting, *_of_scheduler(scheduler)):
        for code, namespace in _codes(function):
            names = names or {name for reader in readers for name in _looked_up_by(reader)}
            if common := sorted(_set_by(code, namespace) & names):
                return f"{who} may set {common[0]}, which data, forward or loss may read"
    return ""


def may_change(function: Any) -> bool:
    """Return whether a function may change what others read: it assigns more than its own variables, or has objects.

    Of any other object than a function of the user, nothing is known.
    """
    inner = _inner(function)
    if not isinstance(inner, types.FunctionType) or inner.__closure__:
        return True
    return any(
        _set_by(code, namespace)
        or not all(isinstance(namespace.get(name), (*_OPEN, *PLAIN, type(None))) for name in _globals_of(code))
        for code, namespace in _codes(inner)
    )


def _looked_up_by(function: Any) -> Iterator[str]:
    for code, _ in _codes(function):
        yield from (*code.co_names, *code.co_freevars)


def is_closed(function: Any) -> bool:
    """Return whether a function of the user uses nothing but its arguments, constants and functions of torch."""
    inner = _inner(function)
    if not isinstance(inner, types.FunctionType) or inner.__closure__ or inner.__defaults__ or inner.__kwdefaults__:
        return False
    values = {**vars(builtins), **inner.__globals__}
    for code in with_inner(inner.__code__):
        for instruction in dis.get_instructions(code):
            operation, name = instruction.opname, instruction.argval
            if operation in _OPENING or (operation == "STORE_ATTR" and name not in ("data", "grad")):
                return False
            if operation in ("LOAD_GLOBAL", "LOAD_NAME") and not _is_of_libraries(values.get(name)):
                return False
    return True


def _inner(function: Any) -> Any:
    """Return the function behind decorators of libraries, such as ``torch.no_grad()``."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif hasattr(function, "__wrapped__") and is_package(
            getattr(getattr(function, "__code__", None), "co_filename", "")
        ):
            function = function.__wrapped__
        else:
            return function


def _is_of_libraries(value: Any) -> bool:
    """Return whether a value belongs to Python's built-in functions or torch."""
    place = value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", ""))
    name = getattr(value, "__name__", "")
    return place.partition(".")[0] in ("torch", "math") or (place == "builtins" and name not in _REACHING)


def _set_by(code: types.CodeType, namespace: Mapping[str, Any]) -> set[str]:
    """Return the names of what a function may change: what it assigns, and containers if it writes into some."""
    operations = [(instruction.opname, instruction.argval) for instruction in dis.get_instructions(code)]
    names = {name for operation, name in operations if operation in _ASSIGNING} - _OF_TENSORS
    writes = any(operation in ("STORE_SUBSCR", "DELETE_SUBSCR") for operation, _ in operations)
    if writes or any(name in _FILLING or (name.endswith("_") and not name.endswith("__")) for name in code.co_names):
        names.update(name for name in _globals_of(code) if isinstance(namespace.get(name), _CONTAINERS))
    if rebinds(code):
        names.update(code.co_freevars)
    return names


def _globals_of(code: types.CodeType) -> set[str]:
    return {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _codes(function: Any, seen: set[types.CodeType] | None = None) -> Iterator[tuple[types.CodeType, dict[str, Any]]]:
    """Yield the code of a function of the user, and of those that it defines or calls by name, with its namespace.

    Of a class that it names, the methods, but for the constructor.
    """
    seen = set() if seen is None else seen
    if isinstance(function, type) and is_own_class(function):
        for name, method in vars(function).items():
            if name not in _CONSTRUCTORS:
                yield from _codes(method, seen)
        return
    inner = _inner(function)
    if is_own_class(type(inner)):  # an object that is called
        inner = _inner(vars(type(inner)).get("__call__"))
    if not isinstance(inner, types.FunctionType) or inner.__code__ in seen or is_package(inner.__code__.co_filename):
        return
    seen.add(inner.__code__)
    for code in with_inner(inner.__code__):
        yield code, inner.__globals__
        for value in map(inner.__globals__.get, _globals_of(code)):
            yield from _codes(value, seen)
            owner = value if is_own_module(value) else type(value) if is_own_class(type(value)) else None
            if owner is not None:
                yield from (each for name in code.co_names for each in _codes(vars(owner).get(name), seen))


def _of_scheduler(scheduler: Any) -> Iterator[tuple[str, Any]]:
    """Yield the user's functions that a scheduler has been given, such as that of a LambdaLR."""
    waiting, seen = [scheduler], set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, types.FunctionType):
            yield "the scheduler", value
        elif isinstance(value, LRScheduler) and id(value) not in seen:
            seen.add(id(value))
            waiting += pytree.tree_leaves([*vars(value).values()])


__all__ = ["is_closed", "may_change", "reading_hook", "setting_hook"]
