"""Restore caches of the user's Python code outside of the model's modules.

A helper may create a table once and keep it (``functools.lru_cache``, a dict or an object at module level, an attribute
of an object that is not a module). After a recording, such a table would hold fake tensors, and break the next real
forward.
"""

from __future__ import annotations

import functools
import gc
import sys
from types import FunctionType, ModuleType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autopipe.trace.record.containers import PLAIN_CONTAINERS, attributes, copied, refill
from autopipe.users_code import is_model_module, is_own_class

_NO_HELPERS = PLAIN_CONTAINERS | {bool, int, float, str, tuple, type(None)}  # the types of most attributes

_MOST_ENTRIES = 64
"""Entries of a dict whose values are looked at, too."""

_DEFINED = (FunctionType, type, functools._lru_cache_wrapper)


class Caches:
    """The current caches of the model's Python modules; ``restore`` restores or empties them."""

    def __init__(self, model: nn.Module) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._memoized: dict[int, tuple[Any, int]] = {}
        self._helpers: set[int] = set()
        for users in users_namespaces(model):
            self._look_at(vars(users))
        for module in model.modules():
            for value in vars(module).values():
                if _is_helper(value):
                    self._look_at_helper(value)
        for kind in dict.fromkeys(type(module) for module in model.modules()):
            self._look_at(dict(vars(kind)), containers=False)
        self._of_packages = {
            id(value): (value, value.cache_info().misses)
            for package in _imported(users_namespaces(model))
            for value in list(vars(package).values())
            if type(value) is functools._lru_cache_wrapper and id(value) not in self._memoized
        }

    def _look_at(self, namespace: dict[Any, Any], *, containers: bool = True) -> None:
        for name, value in namespace.items():
            if isinstance(value, functools._lru_cache_wrapper):
                self._memoized[id(value)] = value, value.cache_info().misses
            elif containers and type(value) in (dict, list, set) and not str(name).startswith("__"):
                self._containers.append((value, copied(value)))
                if type(value) is dict and len(value) <= _MOST_ENTRIES:
                    self._look_at(value)
            elif containers and is_own_class(type(value)) and _is_helper(value) and id(value) not in self._helpers:
                self._look_at_helper(value)

    def _look_at_helper(self, value: Any) -> None:
        self._helpers.add(id(value))
        namespace = attributes(value) or {}
        self._containers.append((namespace, dict(namespace)))
        self._look_at(namespace)

    def restore(self) -> None:
        """Restore containers; clear the memoized functions that were called with new arguments.

        Those of other modules, which may serve more than this model, are cleared only if they hold fake tensors.
        """
        for container, before in self._containers:
            refill(container, before)
        for function, misses in self._memoized.values():
            if function.cache_info().misses != misses:
                function.cache_clear()
        for function, misses in self._of_packages.values():
            if function.cache_info().misses != misses and any(map(_holds_fake, gc.get_referents(function))):
                function.cache_clear()


class MemoizedFakes:
    """The memoized functions of the model's code, while its Python runs on fakes again and again.

    A stage of this process, or the data, may call the same functions with the same arguments.
    """

    def __init__(self, model: nn.Module) -> None:
        caches = Caches(model)
        functions = (*caches._memoized.values(), *caches._of_packages.values())
        self._misses = {id(function): (function, misses) for function, misses in functions}

    def forget(self) -> None:
        """Clear the functions that have returned fakes since the last time."""
        for number, (function, misses) in self._misses.items():
            now = function.cache_info().misses
            if now != misses:
                if any(map(_holds_fake, gc.get_referents(function))):
                    function.cache_clear()
                self._misses[number] = function, function.cache_info().misses


def users_namespaces(model: nn.Module) -> list[Any]:
    """Return the Python modules that define the model's classes."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    return [sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch.")]


def _imported(namespaces: list[Any]) -> list[ModuleType]:
    """Return the other modules that these modules use: what they import, and where their functions come from."""
    modules: dict[str, ModuleType] = {}
    for namespace in namespaces:
        for value in list(vars(namespace).values()):
            if isinstance(value, ModuleType):
                modules[value.__name__] = value
            elif isinstance(value, _DEFINED) and isinstance(sys.modules.get(value.__module__), ModuleType):
                modules[value.__module__] = sys.modules[value.__module__]
    known = {namespace.__name__ for namespace in namespaces}
    return [modules[name] for name in modules.keys() - known if is_model_module(name)]


def _holds_fake(value: Any, depth: int = 3) -> bool:
    """Return whether a value is a fake tensor or a container with one."""
    if isinstance(value, FakeTensor):
        return True
    if not depth or not isinstance(value, (dict, list, tuple)):
        return False
    return any(_holds_fake(entry, depth - 1) for entry in (value.values() if isinstance(value, dict) else value))


def _is_helper(value: Any) -> bool:
    if type(value) in _NO_HELPERS:
        return False
    place = type(value).__module__
    return (
        attributes(value) is not None
        and not isinstance(value, (nn.Module, type))
        and not callable(value)
        and not place.startswith(("torch", "builtins", "collections"))
    )
