"""Which values can hold state, and what lies behind a value that is not an owner of places itself."""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import gc
import itertools
import queue
import random
import threading
import types
import weakref
from collections import UserDict, UserList
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from autopipe.trace.record.containers import CONTAINERS, attributes, length
from autopipe.trace.state.snapshots.fingerprints import PLAIN
from autopipe.trace.state.snapshots.places import slots
from autopipe.users_code import is_model_module

MOST_ENTRIES = 256  # entries of one container that are compared, with its length
_IMMUTABLE = PLAIN | {torch.dtype, torch.device}  # types of default arguments that a function cannot change
_HOLDERS = (
    *(types.SimpleNamespace, argparse.Namespace, threading.local, threading.Semaphore, threading.Event, queue.Queue),
    *(UserDict, UserList, collections.ChainMap),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
"""Classes of the standard library whose objects hold what the user assigns to them."""
_HANDLES = (
    *("autopipe", "threading", "_thread", "concurrent", "multiprocessing", "asyncio", "socket", "subprocess"),
    *("tempfile", "importlib", "_frozen_importlib", "typing", "torch._", "torch.utils.data", "torch.distributed"),
    *("torch.multiprocessing", "torch.fx"),
)
"""Modules whose objects are handles of something else, such as a thread, or are no state."""
_BUILT_IN_METHODS = (types.BuiltinMethodType, types.MethodWrapperType)
_GLOBAL_GENERATORS = (random.random.__self__, np.random.random.__self__)  # type: ignore[attr-defined]  # bound methods
"""The generators of the modules themselves: a recording detects a draw from them, and opaque modules seed them."""
WRAPPERS = (
    *(map, filter, zip, enumerate, types.MappingProxyType),
    *(itertools.chain, itertools.islice, itertools.accumulate, itertools.starmap, itertools.takewhile),
)
"""Classes whose objects hold other objects, and do not show them as attributes."""


def behind(value: Any) -> Iterator[Any]:
    """Yield the objects behind a bound method, a partial, a descriptor, a weak reference or an iterator over others."""
    if isinstance(value, types.MethodType):
        yield value.__func__
        if not any(value.__self__ is one for one in _GLOBAL_GENERATORS):
            yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, (classmethod, staticmethod, property, functools.cached_property)):
        yield from functions_behind(value)
    elif isinstance(value, _BUILT_IN_METHODS):
        owner = value.__self__
        if not isinstance(owner, (type, types.ModuleType)) and not any(owner is one for one in _GLOBAL_GENERATORS):
            yield owner  # ``append = entries.append``, ``draw = itertools.count().__next__``
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, memoryview):
        with contextlib.suppress(ValueError):  # released
            yield value.obj
    elif isinstance(value, frozenset):
        yield from itertools.islice(frozenset.__iter__(value), MOST_ENTRIES)
    elif isinstance(value, WRAPPERS):
        yield from (inner for inner in gc.get_referents(value) if not isinstance(inner, (type, types.ModuleType)))


def may_be_state(entry: Any) -> bool:
    """Return whether a global or class attribute may be state, unlike a module, method or plain function."""
    if isinstance(entry, (classmethod, staticmethod, property, functools.cached_property)):
        return any(map(may_be_state, functions_behind(entry)))
    if isinstance(entry, types.FunctionType):
        defaults = (*(entry.__defaults__ or ()), *(entry.__kwdefaults__ or {}).values())
        return bool(entry.__closure__ or vars(entry)) or not all(type(default) in _IMMUTABLE for default in defaults)
    return not isinstance(entry, types.ModuleType)


def functions_behind(descriptor: Any) -> list[Any]:
    """Return the functions behind a property, a class method or a static method."""
    names = ("fget", "fset", "__func__", "func")
    return [function for name in names if (function := getattr(descriptor, name, None)) is not None]


def memoized(function: Any) -> Iterator[Any]:
    """Yield a memoized function and the results in its cache."""
    parts = gc.get_referents(function)  # keys and results of a cache with a limit, the cache, the function, ...
    wrapped = getattr(function, "__wrapped__", None)
    index = next((index for index, part in enumerate(parts) if part is wrapped), 0)
    if not index:
        return
    cache = parts[index - 1]
    yield wrapped
    results = parts[: index - 1]
    if isinstance(cache, dict):  # of links where there is a limit
        results += itertools.islice(cache.values(), MOST_ENTRIES)
    yield from (result for result in results[:MOST_ENTRIES] if not isinstance(result, (type, types.ModuleType)))


def is_known(owner: Any, content: dict[Any, Any]) -> bool:
    """Return whether the snapshot has recorded all places of an object."""
    if isinstance(owner, (*CONTAINERS, tuple)):
        return isinstance(owner, set) or len(content) == length(owner) + 1  # its entries, and WHOLE
    if isinstance(owner, types.FunctionType):
        return not owner.__closure__ and not owner.__defaults__ and not owner.__kwdefaults__
    return is_users_object(owner) and content.keys() == (attributes(owner) or {}).keys() | slots(owner).keys()


def is_users_object(value: Any) -> bool:
    """Return whether an object has attributes of the user's or of a model library."""
    kind = type(value)
    if attributes(value) is None and not any("__slots__" in vars(base) for base in kind.__mro__):
        return False
    return is_model_module(kind.__module__) or isinstance(value, _HOLDERS)


def has_attributes(value: Any) -> bool:
    """Return whether an object of a library has attributes that are compared: not the handle of a thread or process."""
    kind = type(value)
    return bool(attributes(value)) and not kind.__module__.startswith(_HANDLES)


__all__ = [
    "MOST_ENTRIES",
    "WRAPPERS",
    "behind",
    "functions_behind",
    "has_attributes",
    "is_known",
    "is_users_object",
    "may_be_state",
    "memoized",
]
