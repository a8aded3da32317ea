"""The syntax tree of a function, and the objects that attributes and entries in it refer to."""

from __future__ import annotations

import array
import ast
import functools
import inspect
import linecache
import os
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from autopipe.trace.record.containers import attributes

MOST_OBJECTS = 64

# --- syntax -----------------------------------------------------------------------------------------------------------


def functions(filename: str) -> dict[int, list[ast.AST]]:
    """Return the functions of a file by their first line."""
    return _functions("".join(linecache.getlines(filename)))


@functools.lru_cache(maxsize=64)
def _functions(text: str) -> dict[int, list[ast.AST]]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    by_line: dict[int, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            lines = [node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]
            by_line.setdefault(min(lines), []).append(node)
    return by_line


def function_node(filename: str, code: types.CodeType) -> ast.AST | None:
    """Return the function of a code object, or None if its source is missing or two lambdas share the line."""
    nodes = functions(filename).get(code.co_firstlineno, [])
    named = [node for node in nodes if getattr(node, "name", "<lambda>") == code.co_name]
    return named[0] if len(named) == 1 else None


def asks_for_nothing(test: ast.expr) -> bool:
    """Return whether a condition tests for absence: ``not x``, ``x is None``, ``key not in x``."""
    if isinstance(test, ast.BoolOp):
        return any(asks_for_nothing(value) for value in test.values)
    if isinstance(test, ast.Compare):
        absent = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value in (None, 0)
        return isinstance(test.ops[0], ast.NotIn) or (isinstance(test.ops[0], (ast.Is, ast.Eq)) and absent)
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def by_name(node: ast.Call) -> ast.Attribute | None:
    """Return the attribute access that ``getattr(x, "name")`` or ``setattr(x, "name", value)`` performs."""
    kinds: dict[str, ast.expr_context] = {"getattr": ast.Load(), "setattr": ast.Store()}
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name not in kinds or len(node.args) < 2 or not isinstance(node.args[1], ast.Constant):
        return None
    expression = ast.Attribute(node.args[0], str(node.args[1].value), kinds[name])
    return ast.copy_location(expression, node)


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node of a function, except those of functions and classes defined in it."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child
            yield from walk(child)


def chains(tree: ast.AST, above: tuple[ast.AST, ...] = ()) -> Iterator[tuple[ast.expr, tuple[ast.AST, ...]]]:
    """Yield the longest chains of attributes and entries (``a.b[0].c``), with the enclosing nodes, innermost last."""
    if isinstance(tree, (ast.Attribute, ast.Subscript, ast.Name)):
        yield tree, above
        for link in links(tree):
            if isinstance(link, ast.Subscript):
                yield from chains(link.slice, (*above, link))
            if not isinstance(link, (ast.Attribute, ast.Subscript, ast.Name)):
                yield from chains(link, above)
        return
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from chains(child, (*above, tree))


def links(node: ast.AST) -> list[Any]:
    """Return the expressions of a chain, from the complete chain to its root."""
    expressions = [node]
    while isinstance(expressions[-1], (ast.Attribute, ast.Subscript)):
        expressions.append(expressions[-1].value)
    return expressions


# --- objects ----------------------------------------------------------------------------------------------------------


def attribute(value: Any, name: str) -> list[Any]:
    """Return the value of an attribute without running a property or a method, or [] if it is unknown."""
    if isinstance(value, nn.Module):
        for registry in (value._modules, value._parameters, value._buffers):
            if name in registry:
                return [registry[name]]
    own = vars(value) if isinstance(value, type) else attributes(value)
    if own is not None and name in own:
        return [behind_environment(own[name])]
    try:
        entry = inspect.getattr_static(type(value) if not isinstance(value, type) else value, name)
    except AttributeError:
        return []
    if isinstance(entry, (classmethod, staticmethod)):
        return [entry.__func__]
    return [] if isinstance(entry, property) or own is None else [entry]


def item(value: Any, index: ast.expr) -> list[Any]:
    """Return an entry of a container, or all entries if the index is not a constant."""
    if isinstance(value, (nn.ModuleList, nn.Sequential)):
        value = list(value)
    if isinstance(value, nn.ModuleDict):
        value = dict(value.items())
    if isinstance(value, (list, tuple, dict)) and isinstance(index, ast.Constant):
        key: Any = index.value
        try:
            return [value[key]]
        except (LookupError, TypeError):
            return []
    return elements(value)


def elements(value: Any) -> list[Any]:
    """Return the entries of a container, or the values of a dict."""
    if isinstance(value, (nn.ModuleList, nn.Sequential)):
        return list(value)[:MOST_OBJECTS]
    if isinstance(value, dict):
        return list(dict.values(value))[:MOST_OBJECTS]
    return list(value)[:MOST_OBJECTS] if isinstance(value, (list, tuple)) else []


def has_items(value: Any) -> bool:
    """Return whether a value is a container that can be changed in place."""
    return isinstance(value, (list, dict, set, deque, np.ndarray, bytearray, array.array, memoryview))


def behind_environment(value: Any) -> Any:
    """Return the dict behind ``os.environ`` and the function that reads it, or any other value itself."""
    return vars(os.environ)["_data"] if value is os.environ or value is os.getenv else value


def memory_of(value: Any) -> Any:
    """Return the object whose bytes a ``memoryview`` shows, or any other value itself."""
    return value.obj if isinstance(value, memoryview) else value


def is_model(value: Any) -> bool:
    """Return whether a value is a part of a model, or a list of such parts."""
    return isinstance(value, (nn.Module, nn.Parameter)) or (
        isinstance(value, list) and bool(value) and all(isinstance(entry, (nn.Module, nn.Parameter)) for entry in value)
    )


def holder_of(name: str) -> Any:
    """Return a function that finds the owner of an attribute: the object itself, or the class that defines it."""

    def holder(value: Any) -> Any:
        if isinstance(value, (type, types.ModuleType, types.FunctionType, Tensor)) or name in getattr(
            value, "__dict__", {name: 0}
        ):
            return value
        if isinstance(value, nn.Module) and (name in value._modules or name in value._parameters):
            return value
        return next((kind for kind in type(value).__mro__ if name in vars(kind)), value)

    return holder


def module_of(namespace: dict[str, Any]) -> types.ModuleType | None:
    """Return the module that owns these globals."""
    module = sys.modules.get(namespace.get("__name__", ""))
    return module if module is not None and vars(module) is namespace else None
