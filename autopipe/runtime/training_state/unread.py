"""Values that an optimizer writes and no code reads, such as a norm for the log. They decide nothing."""

from __future__ import annotations

import dis
import functools
import re
import sys
import types
from collections.abc import Iterator
from itertools import chain, pairwise

from autopipe.trace.state.observing.bytecode import with_inner
from autopipe.users_code import is_own_module

# of a value of a group, of a parameter's state, or of the optimizer or scheduler itself
_PLACE = re.compile(
    r"(?:optimizer\.param_groups\[\d+\]|optimizer\.state\[[^\]]+\])\['(\w+)'\]|(?:optimizer|scheduler)\.(\w+)"
)


def is_unread(path: str, *roots: object) -> bool:
    """Return whether the code of these objects' classes, and the user's, only assigns the value at a path.

    All functions are searched of the modules that define the classes, and of those that are not installed: a hook or
    the function of a schedule reads a value, too. A root may be a class itself.
    """
    place = _PLACE.fullmatch(path)
    if place is None:
        return False
    key, reading = (place[1], ("LOAD_CONST",)) if place[1] else (place[2], ("LOAD_CONST", "LOAD_ATTR", "LOAD_METHOD"))
    classes = [root if isinstance(root, type) else type(root) for root in roots if root is not None]
    defining = [sys.modules.get(base.__module__) for kind in classes for base in kind.__mro__[:-1]]
    own = filter(is_own_module, list(sys.modules.values()))
    return not any(_module_reads(module, key, reading) for module in chain(filter(None, defining), own))


@functools.lru_cache(maxsize=4096)
def _module_reads(module: types.ModuleType, key: str, reading: tuple[str, ...]) -> bool:
    return any(_reads(code, key, reading) for code in _codes_of(module))


def _reads(code: types.CodeType, key: str, reading: tuple[str, ...]) -> bool:
    """Return whether one of the operations ``reading`` has a name, but for the assignment of an item."""
    return any(
        one.argval == key and one.opname in reading and (following is None or following.opname != "STORE_SUBSCR")
        for one, following in pairwise([*dis.get_instructions(code), None])
        if one is not None
    )


def _codes_of(module: types.ModuleType) -> Iterator[types.CodeType]:
    """Iterate the code of all functions and classes of a module."""
    for value in list(vars(module).values()):
        if getattr(value, "__module__", "") != module.__name__:
            continue
        for member in vars(value).values() if isinstance(value, type) else (value,):
            for outer in (member, *(getattr(member, name, None) for name in ("fget", "fset"))):
                function = outer
                while function is not None:  # a step is decorated: by torch, and often by its author
                    code = getattr(getattr(function, "__func__", function), "__code__", None)
                    if isinstance(code, types.CodeType):
                        yield from with_inner(code)
                    function = getattr(function, "__wrapped__", None)
