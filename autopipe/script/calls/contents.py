"""What a container or an object holds, for the search of code and for the comparison of values."""

from __future__ import annotations

import collections
import contextvars
import functools
import logging
import types
import weakref
from collections import deque
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from autopipe.trace.record.containers import CONTAINERS, PLAIN_CONTAINERS, attributes
from autopipe.trace.state.snapshots.kinds import behind
from autopipe.trace.state.snapshots.places import slots
from autopipe.users_code import is_own_class, is_own_file

DEPTH = 8
"""Levels of containers and objects in each other that are looked into."""
MOST = 1000
"""Entries of a container, or attributes of an object, that are looked into."""
PLAIN = (bool, int, float, str, complex, bytes, type(None), torch.dtype, torch.device)
_SEQUENCES = (list, tuple, set, frozenset, deque)
_FUNCTIONS = (types.FunctionType, type, types.ModuleType, logging.Logger)
_DESCRIPTORS = (staticmethod, classmethod, property, functools.cached_property)
_OF_MODULES = frozenset(
    (
        *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_flat_weights", "_flat_weight_refs"),
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    )
)
"""Attributes of modules in which torch registers what is compared elsewhere, or what no forward reads."""


class Reader(Protocol):
    """The code that reads. ``registered``: the modules of the model, by id."""

    registered: dict[int, nn.Module]

    def reads(self, name: str) -> bool:
        """Return whether the code may read an attribute of this name."""
        ...


def is_code(value: Any) -> bool:
    """Return whether a value is compared by identity: functions, classes, modules of Python, loggers."""
    if isinstance(value, types.BuiltinFunctionType):  # or the method of an object, such as the append of a list
        return value.__self__ is None or isinstance(value.__self__, (types.ModuleType, type))
    return isinstance(value, (*_FUNCTIONS, *_DESCRIPTORS))


def attributes_of_module(module: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, value) of the attributes of a module that are neither parameters, buffers nor modules."""
    return [entry for entry in (*vars(module).items(), *slots(module).items()) if entry[0] not in _OF_MODULES]


def may_hold(value: Any) -> bool:
    """Return whether a value may hold others, or be code."""
    return not isinstance(value, (*PLAIN, Tensor, np.ndarray)) and (type(value) not in PLAIN_CONTAINERS or bool(value))


def attributes_of(value: Any, code: Reader) -> list[tuple[str, Any]] | None:
    """Return (name, value) of the attributes of an object that the code may read; None if they are too many."""
    if isinstance(value, (collections.UserDict, collections.UserList)):  # their own methods read it
        return [("data", value.data)]
    every = [*(attributes(value) or {}).items(), *slots(value).items()]
    if callable(value) and not is_own_class(type(value)):
        every = [entry for entry in every if isinstance(entry[1], (*PLAIN, *CONTAINERS))]
    return None if len(every) >= MOST else [entry for entry in every if code.reads(entry[0])]


def entries_of(value: Any, code: Reader) -> list[tuple[Any, Any]] | None:
    """Return (key, value) of what a value holds; None if it is not looked into."""
    if not may_hold(value):
        return None
    if isinstance(value, (dict, types.MappingProxyType)):
        return list(value.items()) if 0 < len(value) < MOST else None
    if isinstance(value, weakref.ref):
        return [("referent", value())]
    if isinstance(value, _SEQUENCES):
        return [(None, entry) for entry in value] if 0 < len(value) < MOST else None
    if isinstance(value, functools.partial):
        return [("func", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, types.FunctionType):
        given = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values())
        return list(enumerate(given)) if is_own_file(value.__code__.co_filename) else None
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)) and not is_code(value):
        return list(enumerate(behind(value)))
    if isinstance(value, contextvars.ContextVar):
        return [("value", value.get(None))]
    if isinstance(value, nn.Module):
        return None if id(value) in code.registered else of_hidden(value, code)
    return None if is_code(value) else attributes_of(value, code)


def of_hidden(module: nn.Module, code: Reader) -> list[tuple[str, Any]]:
    """Return (name, value) of what a forward may read of a module that is not registered in the model."""
    entries = [entry for entry in attributes_of_module(module) if entry[0] == "training" or code.reads(entry[0])]
    return [*entries, *((name, below) for name, below in module._modules.items() if below is not None)]
