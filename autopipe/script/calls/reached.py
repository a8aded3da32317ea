"""What a forward may read besides the attributes of its modules: globals, attributes of classes, closures, defaults.

The search begins at ``forward`` of the classes and at functions that are attributes of modules. It follows names: to
methods of the classes, and to functions, classes and modules that are not in an installed package. It looks into
containers, and into objects for attributes whose names the code has: they may hold further functions and objects.
``names`` are those of all attributes that this code may read: a module may hold an object that has nothing to do with
its forward, such as the trainer that runs it.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from torch import nn

from autopipe.script.calls.contents import DEPTH, MOST, attributes_of_module, entries_of, is_code, may_hold
from autopipe.trace.state.observing.bytecode import imported, with_inner
from autopipe.trace.state.snapshots.places import ByIdentity
from autopipe.users_code import is_own_class, is_own_file, is_own_module

_ROOTS = ("forward", "__call__", "__getattr__")
_WHOLE = frozenset(("vars", "__dict__", "asdict", "astuple"))  # read all attributes of an object
_GLOBAL = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL")
_OF_DECORATORS = {"__wrapped__"}  # attributes of functions that are not the script's
_ENVIRONMENT = frozenset(("environ", "getenv"))
UNSET = object()
"""The value of a name that is not bound."""
_MEMOIZED = functools._lru_cache_wrapper
_CONSTRUCTORS = frozenset(("__init__", "__new__", "__post_init__"))
# methods that no operator calls in a forward
_UNCALLED = _CONSTRUCTORS | frozenset(
    f"__{name}__"
    for name in (
        *("repr", "str", "format", "reduce", "reduce_ex", "getstate", "setstate", "del", "dir", "sizeof", "copy"),
        *("deepcopy", "init_subclass", "class_getitem", "set_name"),
    )
)


class Reached:
    """The places of one model. ``values`` reads them again.

    ``kinds``: the classes of its modules. ``registered``: those modules.
    """

    def __init__(self, kinds: tuple[type, ...], registered: Iterable[nn.Module]) -> None:
        self.registered = {id(module): module for module in registered}
        self._places: dict[tuple[int, str], tuple[dict[str, Any] | type, str]] = {}
        self._cells: dict[int, tuple[types.CellType, str]] = {}
        self._functions: dict[int, types.FunctionType] = {}
        self._memoized: dict[int, Any] = {}
        self._wrappers: dict[int, Any] = {}
        self._classes: dict[int, type] = {}
        self._made: set[int] = set()  # classes that the code may call
        self._namespaces: dict[int, dict[str, Any]] = {}
        self._whole = False  # whether an attribute may be read by any name
        self.names: set[str] = set(_ROOTS)
        self._opened: dict[int, Any] = {}  # values in which the search looks further
        self._walked: dict[int, int] = {}  # what it has looked into in this round -> how deep
        for kind in kinds:
            self._class(kind)
        entries = [entry for module in self.registered.values() for entry in attributes_of_module(module)]
        entries = [(key, value) for key, value in entries if may_hold(value)]
        before: tuple[int, ...] = ()
        while before != self._extent():
            before = self._extent()
            self._walked = {}
            for key, value in entries:
                self._attribute(key, value)
            for kind in list(self._classes.values()):
                self._members(kind)
            for value in list(self._opened.values()):
                self._walk(value, DEPTH)

    def _extent(self) -> tuple[int, ...]:
        parts: tuple[Any, ...] = (self._places, self._cells, self._functions, self._classes, self._made, self.names)
        return (*map(len, parts), len(self._opened), self._whole)

    def same(self, other: Reached) -> bool:
        """Return whether another search has had the same result."""
        return self._result() == other._result()

    def _result(self) -> tuple[Any, ...]:
        return (
            *(part.keys() for part in (self._places, self._cells, self._functions, self._memoized, self._classes)),
            self.names,
            self._whole,
        )

    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of names in all classes and globals: a new name may be one that the code reads."""
        return (*(len(vars(kind)) for kind in self._classes.values()), *map(len, self._namespaces.values()))

    def reads(self, name: str) -> bool:
        """Return whether the code may read an attribute of this name."""
        return self._whole or name in self.names

    def values(self, describe: Callable[[Any, int], Hashable]) -> Iterator[tuple[Hashable, str, Hashable]]:
        """Yield (place, its name, what it has now). ``describe``: identifies a value, looking so many levels in."""
        for key, (owner, name) in self._places.items():
            value = value_in(owner, name)
            yield key, name, describe(value, DEPTH)
        for number, (cell, name) in self._cells.items():
            value = _contents(cell)
            yield number, name, describe(value, DEPTH)
        for function in self._functions.values():
            yield ("code", id(function)), f"the code of {function.__qualname__}", ByIdentity(function.__code__)
            if function.__defaults__ or function.__kwdefaults__:
                content = describe((function.__defaults__, function.__kwdefaults__), DEPTH)
                yield id(function), f"the default arguments of {function.__qualname__}", content
            if vars(function).keys() - _OF_DECORATORS:
                content = describe(vars(function), DEPTH)
                yield ("attributes", id(function)), f"an attribute of {function.__qualname__}", content
        if _ENVIRONMENT & self.names:
            yield "environment", "os.environ", hash(tuple(os.environ.items()))

    def memoized(self) -> Iterator[tuple[Hashable, str, Hashable]]:
        """Yield (place, name, number of results that it computed) of the functions that keep their results."""
        for function in self._memoized.values():
            name = getattr(function, "__qualname__", None) or repr(function.__wrapped__)
            yield id(function), name, function.cache_info().misses

    def functions_of(self, places: Iterable[Hashable]) -> list[Any]:
        """Return the functions of places that ``memoized`` has given."""
        wanted = set(places)
        return [function for number, function in self._memoized.items() if number in wanted]

    def bindings(self) -> dict[Hashable, tuple[dict[str, Any] | type, str, Any]]:
        """Return by place what can be bound again: a dictionary of globals or a class, the name, the value now."""
        return {key: (owner, name, value_in(owner, name)) for key, (owner, name) in self._places.items()}

    def _class(self, kind: type) -> None:
        for owner in kind.__mro__:
            if owner is not object and not str(owner.__module__).startswith("torch."):
                self._classes.setdefault(id(owner), owner)

    def _members(self, kind: type) -> None:
        """Follow what the code may read of a class: by name, or by an operator."""
        own = is_own_class(kind)
        for name, value in list(vars(kind).items()):
            method = own and name.startswith("__") and isinstance(value, types.FunctionType)
            if (
                name in self.names
                or (method and name not in _UNCALLED)
                or (method and name in _CONSTRUCTORS and id(kind) in self._made)
            ):
                self._place(kind, name)
                self._follow(value)
                if own:
                    self._open(value)

    def _attribute(self, key: str, value: Any) -> None:
        """Follow an attribute of a module: a function of any name, and what holds others if the code names it."""
        self._follow_own(value)
        if self.reads(key):
            self._open(value)
        elif isinstance(value, (dict, list, tuple)) and len(value) < MOST:  # code of torch may read the table
            for entry in list(value.values()) if isinstance(value, dict) else list(value):
                if is_code(entry) or isinstance(entry, (types.MethodType, functools.partial)):
                    self._follow_own(entry)

    def _open(self, value: Any) -> None:
        """Look into a value, too."""
        if entries_of(value, self) is not None:
            self._opened.setdefault(id(value), value)

    def _walk(self, value: Any, depth: int) -> None:
        """Follow what a container or an object holds, as deep as it is compared."""
        inside = entries_of(value, self) if self._walked.get(id(value), 0) < depth else None
        if inside is None:
            return
        self._walked[id(value)] = depth
        if isinstance(value, nn.Module):  # that is not registered
            self._class(type(value))
        for _, entry in inside:
            self._follow_own(entry)
            self._walk(entry, depth - 1)

    def _place(self, owner: dict[str, Any] | type, name: str) -> None:
        self._places.setdefault((id(owner), name), (owner, name))

    def _follow(self, value: Any) -> None:
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._follow(part)
        elif isinstance(value, type):
            if is_own_class(value):
                self._class(value)
                if not issubclass(value, nn.Module):
                    self._made.update(map(id, value.__mro__))
        elif isinstance(value, _MEMOIZED):
            if id(value) not in self._memoized:
                self._memoized[id(value)] = value
                self._follow(value.__wrapped__)
        elif isinstance(value, types.FunctionType):
            if id(value) not in self._functions:
                self._functions[id(value)] = value
                self._code(value)
                self._open(value)
                self._follow_own(getattr(value, "__wrapped__", None))
        else:
            for inner in _behind(value):
                self._follow(inner)

    def _code(self, function: types.FunctionType) -> None:
        place = function.__globals__
        if is_own_file(function.__code__.co_filename):
            self._namespaces[id(place)] = place
        for code in with_inner(function.__code__):
            names = {*code.co_names, *_texts(code.co_consts)}
            self.names |= names
            own = is_own_file(code.co_filename)
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
            self._target(_contents(cell), set(), own=False)

    def _target(self, value: Any, names: set[str], *, own: bool) -> None:
        if isinstance(value, types.ModuleType):
            self._module(value, names, own=own)
        else:
            self._follow_own(value)
            self._open(value)

    def _module(self, module: types.ModuleType | None, names: set[str], *, own: bool) -> None:
        """Add what a module has by these names. ``own``: the script's code names it, which may also replace it."""
        if module is None:
            return
        is_own = is_own_module(module)
        for name in names & vars(module).keys() if own or is_own else ():
            if (id(vars(module)), name) not in self._places:
                self._place(vars(module), name)
                value = vars(module)[name]
                if is_own or isinstance(value, types.ModuleType):
                    self._target(value, names, own=own)

    def _follow_own(self, value: Any) -> None:
        """Follow a function, class or object with methods, if it is not one of an installed package."""
        code = None if is_own_class(type(value)) else _code_of(value)
        if code is not None and not is_own_file(code.co_filename):
            self._wrapped(value)
            return
        self._follow(value)
        if isinstance(value, types.MethodType):
            value = value.__self__
        if not is_code(value) and not isinstance(value, functools.partial) and is_own_class(type(value)):
            self._class(type(value))  # its methods

    def _wrapped(self, value: Any) -> None:
        """Follow the script's functions that a function of an installed package calls, such as one of a decorator."""
        if id(value) not in self._wrappers:
            self._wrappers[id(value)] = value
            cells = map(_contents, getattr(value, "__closure__", None) or ())
            for inner in (getattr(value, "__wrapped__", None), *cells):
                if isinstance(inner, (types.FunctionType, types.MethodType, _MEMOIZED)):
                    self._follow_own(inner)


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


def _behind(value: Any) -> Iterator[Any]:
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield value.__func__
    elif isinstance(value, property):
        yield from (part for part in (value.fget, value.fset, value.fdel) if part is not None)
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif isinstance(value, functools.partialmethod):
        yield from (value.func, *value.args, *value.keywords.values())


def _code_of(value: Any) -> types.CodeType | None:
    """Return the code of a function, or of the one that it wraps. An object may have anything under these names."""
    for function in (value, getattr(value, "__wrapped__", None)):
        code = getattr(function, "__code__", None)
        if isinstance(code, types.CodeType):
            return code
    return None


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return UNSET


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
