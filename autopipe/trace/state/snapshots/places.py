"""Read the value at a place of a snapshot, without running the user's methods."""

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


__all__ = ["OF_FUNCTIONS", "ByIdentity", "slots", "value_at"]
