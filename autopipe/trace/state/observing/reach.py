"""What the functions that ran can reach by name: globals, closures and the classes of their objects."""

from __future__ import annotations

import gc
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from autopipe.trace.record.caches import users_namespaces
from autopipe.trace.state.observing import bytecode
from autopipe.trace.state.observing.observe import Ran
from autopipe.trace.state.snapshots.places import OF_FUNCTIONS
from autopipe.trace.state.snapshots.snapshot import Names
from autopipe.users_code import is_model_module, is_own_file, is_own_module, is_package

_NAMESPACES = (types.ModuleType, type)
_ENVIRONMENT = frozenset(("environ", "environb", "getenv", "putenv"))


def named(ran: Ran) -> Iterator[tuple[str, Any]]:
    """Yield what a function reaches by name: globals, also of modules that it names, its closure and its classes."""
    yield from ((module.__name__, Names(module, names)) for module, names in _modules_by_name(ran))
    is_own = is_own_file(ran.code.co_filename)
    for owner in _of_libraries(ran) if ran.stored or is_own else ():
        if names := ran.stored | (_containers(owner, ran.looked_up) if is_own else frozenset()):
            yield owner.__name__, Names(owner, names)
    if ran.looked_up & _ENVIRONMENT:
        yield "os.environ", vars(os.environ)["_data"]
    if ran.looked_up & {*OF_FUNCTIONS}:
        yield from _functions(ran)
    for name, content in ran.cells:
        yield f"{name} of {ran.code.co_name}", content
    yield from ((function.__name__, function) for function in _rebinding(ran))
    classes = dict.fromkeys(base for kind in ran.classes for base in (*kind.__mro__, *type.mro(type(kind))))
    yield from ((kind.__name__, kind) for kind in classes if is_model_module(kind.__module__))


def roots(model: nn.Module, hooks: Mapping[str, Any], ran: Iterable[Ran] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (readable path, object) for the model, the loss, and the user's modules, also those of functions that ran.

    ``hooks``: the user's functions by name.
    """
    yield "model", model
    if "loss" in hooks:
        yield "loss", hooks["loss"]
    names = {module.__name__ for module in users_namespaces(model)}
    names |= {module_name(one) for one in ran if not is_package(one.code.co_filename)}
    names |= {getattr(hook, "__module__", None) or "" for hook in hooks.values()}
    yield from modules(names)


def modules(names: set[str]) -> Iterator[tuple[str, types.ModuleType]]:
    """Yield the user's modules of these names, and the modules in their globals that are the user's own files."""
    pending, seen = sorted(names), set(names)
    while pending:
        module = sys.modules.get(pending.pop(0))
        if module is None or not is_model_module(module.__name__):
            continue
        yield module.__name__, module
        if not is_own_module(module):
            continue
        for value in vars(module).values():  # a user module may contain only state
            if isinstance(value, types.ModuleType) and value.__name__ not in seen:
                seen.add(value.__name__)
                if is_own_module(value):
                    pending.append(value.__name__)


def module_name(ran: Ran) -> str:
    """Return the name of the module that a function belongs to."""
    return str(ran.globals.get("__name__", ""))


def _modules_by_name(ran: Ran) -> Iterator[tuple[types.ModuleType, frozenset[str]]]:
    """Yield the modules that a function reaches by name, with the names that it may look up in them."""
    names = ran.looked_up
    pending, seen = [sys.modules.get(module_name(ran)), *_imported(ran)], set()
    if "modules" in names:  # sys.modules["name"]
        pending += [sys.modules.get(text) for text in ran.code.co_consts if isinstance(text, str)]
    while pending:
        module = pending.pop()
        if module is None or id(module) in seen or not is_model_module(module.__name__):
            continue
        seen.add(id(module))
        yield module, names
        pending += [value for name in names if isinstance(value := vars(module).get(name), types.ModuleType)]


def _containers(owner: types.ModuleType | type, names: frozenset[str]) -> frozenset[str]:
    """Return those of the names that are containers of a module of a library, such as ``sys.path``."""
    if not isinstance(owner, types.ModuleType):
        return frozenset()
    own = vars(owner)
    return frozenset(name for name in names if type(own.get(name)) in (list, dict, set)) - {"modules"}


def _functions(ran: Ran) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the functions that a function names."""
    spaces = (ran.globals, *(vars(module) for module, _ in _modules_by_name(ran)))
    for name in sorted(ran.looked_up):
        for value in (space.get(name) for space in spaces):
            if isinstance(value, types.FunctionType):
                yield name, value


def _of_libraries(ran: Ran) -> Iterator[types.ModuleType | type]:
    """Yield the modules and classes of torch, numpy and the standard library that a function names."""
    names = ran.looked_up
    pending: list[Any] = [value for name in names if isinstance(value := ran.globals.get(name), _NAMESPACES)]
    pending += _imported(ran)
    seen = set()
    while pending:
        owner = pending.pop()
        name = owner.__module__ if isinstance(owner, type) else getattr(owner, "__name__", "")
        if owner is None or id(owner) in seen or is_model_module(name):
            continue
        seen.add(id(owner))
        yield owner
        pending += [value for name in names if isinstance(value := vars(owner).get(name), _NAMESPACES)]


def _imported(ran: Ran) -> Iterator[types.ModuleType | None]:
    """Yield the modules that a function imports while it runs."""
    for name in ran.imported:
        around, dot = str(ran.globals.get("__package__") or ""), "."
        yield sys.modules.get(name)
        yield sys.modules.get(name.partition(".")[0])
        while dot:  # a relative import, of any level
            yield sys.modules.get(f"{around}.{name}".strip("."))
            around, dot, _ = around.rpartition(".")


def _rebinding(ran: Ran) -> list[types.FunctionType]:
    """Return the functions with this code, if it assigns to a variable of its closure (``nonlocal``).

    A frame does not give access to its cells, so the functions are looked up once.
    """
    if ran.functions is None:
        rebinds = not ran.is_inner and bytecode.rebinds(ran.code)
        referrers = gc.get_referrers(ran.code) if rebinds else ()
        ran.functions = [one for one in referrers if isinstance(one, types.FunctionType)]
    return ran.functions


__all__ = ["module_name", "named", "roots"]
