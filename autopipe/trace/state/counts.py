"""Refuse a forward or loss that reads a number which no Python object holds, and which changes from step to step."""

from __future__ import annotations

import ast
import atexit
import functools
import gc
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autopipe.errors import TraceError
from autopipe.trace.state.reading.feeds import Feeds, innermost
from autopipe.trace.state.reading.source import Reader
from autopipe.trace.state.reading.syntax import chains, links
from autopipe.trace.state.refusal import FORWARD
from autopipe.trace.state.snapshots.snapshot import Snapshot
from autopipe.users_code import is_own_file

if TYPE_CHECKING:
    from autopipe.trace.state.check import Look

_FUNCTIONS = {
    "getrefcount": sys.getrefcount,
    "getallocatedblocks": sys.getallocatedblocks,
    "get_count": gc.get_count,
    "get_stats": gc.get_stats,
    "get_objects": gc.get_objects,
    "get_referrers": gc.get_referrers,
    "getweakrefcount": weakref.getweakrefcount,
    "getweakrefs": weakref.getweakrefs,
    "_ncallbacks": atexit._ncallbacks,
}
_ATTRIBUTES: dict[str, type] = {"_version": Tensor, "cache_info": functools._lru_cache_wrapper}
"""Attribute -> the type of the objects that count with it."""
_NAMES = _FUNCTIONS.keys() | _ATTRIBUTES.keys()


def refuse_counts(look: Look, last: Snapshot) -> None:
    """Refuse a function of the user that reads such a number and does not only print it."""
    for ran in look.ran.values():
        if not _names(ran.code) & _NAMES or not is_own_file(ran.code.co_filename):
            continue
        reader = Reader(ran, last)
        for node, above in chains(reader.tree) if reader.tree is not None else ():
            count = next((link for link in links(node) if _is_count(reader, link)), None)
            if count is None:
                continue
            feeds = Feeds(reader).of(innermost(above), above)
            if feeds is None or look.is_read(feeds, last):
                raise TraceError(
                    f"{FORWARD} depends on {ast.unparse(count)}, which changes from step to step: "
                    "the model is not one fixed graph",
                    where=reader.where(node),
                    remedy="count steps in a buffer (register_buffer) that torch operations update",
                )


def _names(code: types.CodeType) -> set[str]:
    """Return the names that a function looks up, in its comprehensions too."""
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType) and one.co_name.startswith("<"))
    return {*code.co_names}.union(*map(_names, inner))


def _is_count(reader: Reader, node: Any) -> bool:
    """Return whether an expression is one of the functions, or one of the attributes of an object that counts."""
    if isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES:
        return any(isinstance(value, _ATTRIBUTES[node.attr]) for value in reader.objects(node.value))
    if not isinstance(node, (ast.Attribute, ast.Name)):
        return False
    name = node.attr if isinstance(node, ast.Attribute) else node.id
    function = _FUNCTIONS.get(name)
    if function is None:
        return False
    values = reader.objects(node)
    is_named = isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("sys", "gc", "weakref", "atexit")
    return any(value is function for value in values) or (not values and is_named)  # it may be imported in the function


__all__ = ["refuse_counts"]
