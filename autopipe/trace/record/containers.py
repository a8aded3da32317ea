"""Read, compare and restore containers and user objects without running their methods.

A subclass may forbid changes (the configuration of every diffusers model is such a dict) or compare tensors, so the
methods of the base classes are called, and only on a container whose content differs.
"""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

CONTAINERS = (list, dict, set, deque)
PLAIN_CONTAINERS = frozenset((list, dict, set, deque, OrderedDict))  # their methods are not the user's


def attributes(value: Any) -> dict[str, Any] | None:
    """Return the attribute dictionary of an object, if it has one, without calling its class."""
    base: Any = threading.local if isinstance(value, threading.local) else object
    try:
        attributes = base.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if isinstance(attributes, dict) else None


def entries(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (key, value) of each entry of a dict, and (index, value) of a list, tuple or deque."""
    if isinstance(container, dict):
        return iter(_base(container).items(container))
    base: Any = next(kind for kind in (list, tuple, deque) if isinstance(container, kind))
    return enumerate(base.__iter__(container))


def length(container: Any) -> int:
    """Return the number of entries."""
    base: Any = next(kind for kind in (list, dict, set, tuple, deque) if isinstance(container, kind))
    return int(base.__len__(container))


def copied(container: Any) -> Any:
    """Return the content of a list, dict, set or deque (subclasses too) as a plain container; () if it is empty."""
    if type(container) in PLAIN_CONTAINERS and not container:
        return ()  # most are: a module has a dozen dictionaries of hooks
    if isinstance(container, list):
        return list.copy(container) or ()
    if isinstance(container, deque):
        return list(deque.__iter__(container)) or ()
    if isinstance(container, set):
        return set.copy(container) or ()
    return dict(_base(container).items(container)) or ()


def same(container: Any, before: Any) -> bool:
    """Return whether a container has the same objects that ``copied`` returned, a dict in the same order."""
    if isinstance(container, set):
        return set.__len__(container) == len(before) and all(set.__contains__(container, entry) for entry in before)
    if isinstance(container, (list, deque)):
        base: Any = list if isinstance(container, list) else deque
        return base.__len__(container) == len(before) and all(map(operator.is_, base.__iter__(container), before))
    if dict.__len__(container) != len(before):
        return False
    base = _base(container)
    return not before or (
        all(map(operator.is_, base.keys(container), before))
        and all(map(operator.is_, base.values(container), before.values()))
    )


def refill(container: Any, before: Any) -> None:
    """Restore the content that ``copied`` returned. A container with that content is not touched."""
    if not before and type(container) in PLAIN_CONTAINERS and not container:
        return
    if same(container, before):
        return
    if isinstance(container, list):
        list.__setitem__(container, slice(None), before)
    elif isinstance(container, deque):
        deque.clear(container)
        deque.extend(container, before)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, before)
    else:
        base = _base(container)
        base.clear(container)
        for key, value in before.items() if before else ():
            base.__setitem__(container, key, value)


def _base(container: Any) -> Any:
    return OrderedDict if isinstance(container, OrderedDict) else dict
