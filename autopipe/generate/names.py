"""Names of variables: the user's own names, which are reused as soon as the old value is no longer needed.

``x = self.ln(x)`` is written unchanged. A number is added only if two values with one name are needed at the same time.
"""

from __future__ import annotations

import ast
import keyword
import linecache
import operator
import re
from collections.abc import Iterable, Mapping

from torch import fx

_RESERVED = {*keyword.kwlist, "self", "slice", "float", "complex", "guards", "_"}


def base_names(graph: fx.Graph) -> dict[str, str]:
    """Return, by value, its name without the number that makes it unique in the graph."""
    names = {node.name for node in graph.nodes}
    bases: dict[str, str] = {}
    for node in graph.nodes:
        bases[node.name] = _without_number(node, names, bases)
    return bases


def _without_number(node: fx.Node, names: set[str], bases: dict[str, str]) -> str:
    holder = node.args[0] if node.args else None
    if node.target is operator.getitem and isinstance(holder, fx.Node) and node.name.startswith(f"{holder.name}_"):
        return bases[holder.name] + node.name.removeprefix(holder.name)
    match = re.fullmatch(r"(.+)_\d+", node.name)
    name = match.group(1) if match and match.group(1) in names else node.name
    if node.op == "call_method" and node.target == "size" and name == "size":
        return "batch" if node.args[1:] == (0,) else "length"
    return name.lower() if isinstance(node.target, type) else name


def unpacked(source: tuple[str, int]) -> ast.Tuple | None:
    """Return the targets of the user's line if it is an assignment like ``a, (b, c) = ...``; else None."""
    line = linecache.getline(*source).strip()
    left, _, right = line.partition(" = ")
    if not right or "," not in left:
        return None
    try:
        target = ast.parse(left, mode="eval").body
    except SyntaxError:
        return None
    return target if isinstance(target, ast.Tuple) and _plain(target) else None


def _plain(target: ast.expr) -> bool:
    if isinstance(target, ast.Tuple):
        return all(_plain(item) for item in target.elts)
    return isinstance(target, ast.Name)


class Variables:
    """Assigns variable names while the statements of a stage are written one after another."""

    def __init__(self, bases: Mapping[str, str], last_use: Mapping[str, float], reserved: Iterable[str]) -> None:
        """``last_use``: value -> number of the last statement that reads it. ``reserved``: names that are in use."""
        self._bases = bases
        self._last_use = last_use
        self._reserved = _RESERVED | set(reserved)
        self._until: dict[str, float] = {}  # variable -> number of the last statement that reads it

    def is_read(self, value: str) -> bool:
        """Return whether any statement reads a value."""
        return value in self._last_use

    def name(self, value: str, statement: int, base: str = "") -> str:
        """Return the variable for the value of a statement, which may be one that the statement reads last."""
        base = base or self._bases.get(value, value)
        while base in self._reserved:
            base += "_"
        name, number = base, 2
        while self._until.get(name, -1) > statement or name in self._reserved:
            name, number = (f"{base}{number}" if not base[-1].isdigit() else f"{base}_{number}"), number + 1
        self._until[name] = self._last_use.get(value, statement)
        return name

    def share(self, variable: str, value: str) -> None:
        """Use a variable for another value too: the same tensor, changed in place."""
        self._until[variable] = max(self._until.get(variable, -1), self._last_use.get(value, -1))
