"""Read and write the value at a place of a snapshot, without running the user's methods."""

from __future__ import annotations

import contextvars
import types
from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopipe.trace.record.containers import attributes
from autopipe.trace.state.snapshots.settings import Settings

OF_FUNCTIONS = ("__defaults__", "__kwdefaults__", "__code__")
"""Attributes of a function that it runs with."""


@dataclass(frozen=True, eq=False)
class ByIdentity:
    """The key of a dict entry whose own key cannot be compared without running user code."""

    key: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.key is self.key

    def __hash__(self) -> int:
        return id(self.key)


class Unusable:
    """A placeholder for a value that a run should not read. It can only be printed."""

    def __repr__(self) -> str:
        return "a value of the previous run"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __bool__(self) -> bool:
        raise ValueError("the value of the previous run is read")

    def __eq__(self, other: object) -> bool:
        raise ValueError("the value of the previous run is read")

    __hash__ = None  # type: ignore[assignment]  # the value must not be usable as a key


def slots(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that are stored in ``__slots__``."""
    content = {}
    for kind in type(value).__mro__:
        for name, member in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    content[name] = member.__get__(value)
                except AttributeError:
                    continue  # not set yet
    return content


def value_at(owner: Any, key: Any) -> Any:
    """Return the value at a place, or None if it is unknown."""
    if isinstance(owner, Settings):
        return owner.read(key)
    if isinstance(owner, Tensor):
        return (attributes(owner) or {}).get(key, owner)
    if isinstance(owner, types.FunctionType) and key in OF_FUNCTIONS:
        return getattr(owner, key)
    try:
        if isinstance(owner, types.CellType):
            return owner.cell_contents
        if isinstance(owner, contextvars.ContextVar):
            return owner.get(None)
        if isinstance(owner, dict):
            return dict.get(owner, key.key if isinstance(key, ByIdentity) else key)
        if isinstance(owner, (list, tuple, deque)):
            return owner[key]
    except (LookupError, TypeError, ValueError):
        return None
    own = vars(owner) if isinstance(owner, (type, types.ModuleType)) else attributes(owner)
    if own is not None and key in own:
        return own[key]
    return slots(owner).get(key)


def put(owner: Any, key: Any, value: Any) -> bool:
    """Replace the value at a place. Return False if that is impossible."""
    if isinstance(owner, types.CellType):
        owner.cell_contents = value
    elif isinstance(owner, contextvars.ContextVar):
        owner.set(value)
    elif isinstance(owner, dict):
        name = key.key if isinstance(key, ByIdentity) else key
        if name not in owner:
            return False
        dict.__setitem__(owner, name, value)
    elif isinstance(owner, (list, deque)) and type(key) is int:
        kind: Any = list if isinstance(owner, list) else deque
        kind.__setitem__(owner, key, value)
    elif isinstance(owner, (type, types.ModuleType)) or (isinstance(owner, types.FunctionType) and key in OF_FUNCTIONS):
        setattr(owner, key, value)
    elif key in (attributes(owner) or {}):
        (attributes(owner) or {})[key] = value
    elif key in slots(owner):
        object.__setattr__(owner, key, value)
    else:
        return False
    return True


__all__ = ["OF_FUNCTIONS", "ByIdentity", "Unusable", "put", "slots", "value_at"]
