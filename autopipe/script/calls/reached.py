"""What a forward may read besides the attributes of its modules: globals, attributes of classes, closures, defaults.

The search begins at ``forward`` of the classes and at functions that are attributes of modules. It follows names: to
methods of the classes, and to functions, classes and modules that are not in an installed package. ``names`` are those
of all attributes that this code may read: a module may hold an object that has nothing to do with its forward, such as
the trainer that runs it.
"""

from __future__ import annotations

import dis
import functools
import logging
import os
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from torch import nn

from autopipe.script.refusals import in_a_library
from autopipe.trace.state.observing.bytecode import imported

_ROOTS = ("forward", "__call__", "__getattr__")
_WHOLE = frozenset(("vars", "__dict__", "asdict", "astuple"))  # read all attributes of an object
_GLOBAL = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL")
_OF_DECORATORS = {"__wrapped__"}  # attributes of functions that are not the script's
_ENVIRONMENT = frozenset(("environ", "getenv"))
UNSET = object()
"""The value of a name that is not bound."""
_DEPTH = 4
_MOST = 1000  # entries of a table of functions
_FUNCTIONS = (types.FunctionType, type, types.ModuleType, nn.Module, logging.Logger)
_DESCRIPTORS = (staticmethod, classmethod, property, functools.cached_property)
_MEMOIZED = functools._lru_cache_wrapper


class Reached:
    """The places of one model. ``values`` reads them again."""

    def __init__(self, kinds: tuple[type, ...], attributes: tuple[Any, ...]) -> None:
        self._places: dict[tuple[int, str], tuple[dict[str, Any] | type, str]] = {}
        self._cells: dict[int, tuple[types.CellType, str]] = {}
        self._functions: list[types.FunctionType] = []
        self._memoized: list[Any] = []
        self._seen: set[int] = set()
        self._whole = False  # whether an attribute may be read by any name
        self._classes: list[type] = []
        self.names: set[str] = set(_ROOTS)
        self.attributes = attributes  # kept, so that their ids stay theirs
        for kind in kinds:
            self._class(kind)
        for value in attributes:
            self._follow_own(value)
        count = -1
        while count != len(self._functions) + len(self._classes) + len(self.names):
            count = len(self._functions) + len(self._classes) + len(self.names)
            for kind in list(self._classes):
                for name, value in list(vars(kind).items()):
                    if name in self.names:
                        self._place(kind, name)
                        self._follow(value)
        self._links = self._targets()

    def current(self) -> bool:
        """Return whether every place still leads to the same functions, classes and modules."""
        return self._links == self._targets()

    def reads(self, name: str) -> bool:
        """Return whether the code may read an attribute of this name."""
        return self._whole or name in self.names

    def values(self, describe: Callable[[Any, int], Hashable]) -> Iterator[tuple[Hashable, str, Hashable]]:
        """Yield (place, its name, what it has now). ``describe``: identifies a value, looking so many levels in."""
        for key, (owner, name) in self._places.items():
            value = value_in(owner, name)
            yield key, name, id(value) if is_code(value) else describe(value, _DEPTH)
        for number, (cell, name) in self._cells.items():
            value = _contents(cell)
            yield number, name, id(value) if is_code(value) else describe(value, _DEPTH)
        for function in self._functions:
            if function.__defaults__ or function.__kwdefaults__:
                content = describe((function.__defaults__, function.__kwdefaults__), _DEPTH)
                yield id(function), f"the default arguments of {function.__qualname__}", content
            if vars(function).keys() - _OF_DECORATORS:
                content = describe(vars(function), _DEPTH)
                yield ("attributes", id(function)), f"an attribute of {function.__qualname__}", content
        if _ENVIRONMENT & self.names:
            yield "environment", "os.environ", hash(tuple(os.environ.items()))

    def memoized(self) -> Iterator[tuple[Hashable, str, Hashable]]:
        """Yield (place, name, number of results that it computed) of the functions that keep their results."""
        for function in self._memoized:
            yield id(function), function.__qualname__, function.cache_info().misses

    def functions_of(self, places: Iterable[Hashable]) -> list[Any]:
        """Return the functions of places that ``memoized`` has given."""
        wanted = set(places)
        return [function for function in self._memoized if id(function) in wanted]

    def bindings(self) -> dict[Hashable, tuple[dict[str, Any] | type, str, Any]]:
        """Return by place what can be bound again: a dictionary of globals or a class, the name, the value now."""
        return {key: (owner, name, value_in(owner, name)) for key, (owner, name) in self._places.items()}

    def _targets(self) -> tuple[int, ...]:
        values = [value_in(owner, name) for owner, name in self._places.values()]
        values += [_contents(cell) for cell, _ in self._cells.values()]
        return (*(id(v) for v in values if is_code(v)), *(id(f.__code__) for f in self._functions))

    def _class(self, kind: type) -> None:
        for owner in kind.__mro__:
            if owner is object or owner.__module__.startswith("torch.") or id(owner) in self._seen:
                continue
            self._seen.add(id(owner))
            self._classes.append(owner)

    def _place(self, owner: dict[str, Any] | type, name: str) -> None:
        self._places.setdefault((id(owner), name), (owner, name))

    def _follow(self, value: Any) -> None:
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._follow(part)
        elif isinstance(value, type):
            if not in_a_library(getattr(sys.modules.get(value.__module__), "__file__", None) or ""):
                self._class(value)
        elif isinstance(value, _MEMOIZED):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._memoized.append(value)
                self._follow(value.__wrapped__)
        elif isinstance(value, types.FunctionType):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._functions.append(value)
                self._code(value)
                self._follow_own(getattr(value, "__wrapped__", None))
        else:
            for inner in _behind(value):
                self._follow(inner)

    def _code(self, function: types.FunctionType) -> None:
        place = function.__globals__
        for code in _codes(function.__code__):
            names = {*code.co_names, *_texts(code.co_consts)}
            self.names |= names
            own = not in_a_library(code.co_filename)
            self._whole |= bool(_WHOLE & names) or (own and "getattr" in names)
            read = _globals_in(code) | (names if "globals" in names else set())
            for name in read & place.keys():
                self._place(place, name)
                self._target(place[name], names, own=own)
            for name in imported(code):
                self._module(sys.modules.get(name), names, own=own)
                self._module(sys.modules.get(f"{place.get('__package__') or ''}.{name}".strip(".")), names, own=own)
        for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
            self._cells.setdefault(id(cell), (cell, name))
            self._follow_own(_contents(cell))

    def _target(self, value: Any, names: set[str], *, own: bool) -> None:
        if isinstance(value, types.ModuleType):
            self._module(value, names, own=own)
        else:
            self._follow_own(value)

    def _module(self, module: types.ModuleType | None, names: set[str], *, own: bool) -> None:
        """Add what a module has by these names. ``own``: the script's code names it, which may also replace it."""
        if module is None:
            return
        library = in_a_library(getattr(module, "__file__", None) or "")
        for name in names & vars(module).keys() if own or not library else ():
            if (id(vars(module)), name) not in self._places:
                self._place(vars(module), name)
                value = vars(module)[name]
                if not library or isinstance(value, types.ModuleType):
                    self._target(value, names, own=own)

    def _follow_own(self, value: Any) -> None:
        """Follow a function, class or object with methods, if it is not one of an installed package."""
        code = getattr(value, "__code__", None) or getattr(getattr(value, "__wrapped__", None), "__code__", None)
        if code is not None and in_a_library(code.co_filename):
            return
        self._follow(value)
        if isinstance(value, (dict, list, tuple)) and len(value) < _MOST:  # a table of functions
            for entry in list(value.values()) if isinstance(value, dict) else list(value):
                if isinstance(entry, (*_FUNCTIONS, *_DESCRIPTORS, types.MethodType, functools.partial)):
                    self._follow_own(entry)
        if not is_code(value) and not isinstance(value, (*_DESCRIPTORS, types.MethodType, functools.partial)):
            self._follow(type(value))  # its methods


def value_in(owner: dict[str, Any] | type, name: str) -> Any:
    """Return the value of a global name or of an attribute of a class itself, ``UNSET`` if it is not bound."""
    return owner.get(name, UNSET) if isinstance(owner, dict) else vars(owner).get(name, UNSET)


def bind(owner: dict[str, Any] | type, name: str, value: Any) -> None:
    """Bind a global name or an attribute of a class, or undo its binding."""
    if isinstance(owner, dict):
        if value is UNSET:
            owner.pop(name, None)
        else:
            owner[name] = value
    elif value is not UNSET:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


def is_code(value: Any) -> bool:
    """Return whether a value is compared by identity: functions, classes, modules, loggers."""
    if isinstance(value, types.BuiltinFunctionType):  # or the method of an object, such as the append of a list
        return value.__self__ is None or isinstance(value.__self__, (types.ModuleType, type))
    return isinstance(value, (*_FUNCTIONS, *_DESCRIPTORS))


def _behind(value: Any) -> Iterator[Any]:
    if isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, types.MethodType):
        yield value.__func__
        yield type(value.__self__)
    elif isinstance(value, property):
        yield from (part for part in (value.fget, value.fset, value.fdel) if part is not None)
    elif isinstance(value, functools.cached_property):
        yield value.func


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return UNSET


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _texts(constants: Any) -> Iterator[str]:
    """Yield the texts that getattr may name."""
    for constant in constants:
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts(constant)


@functools.lru_cache(maxsize=4096)
def _globals_in(code: types.CodeType) -> set[str]:
    """Return the global names that the code reads or binds. ``co_names`` also has those of attributes."""
    return {str(step.argval) for step in dis.get_instructions(code) if step.opname in _GLOBAL}
