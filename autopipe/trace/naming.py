"""Names for values, as a reader of the user's file would expect them.

The name on the left of the user's line where the value is the last one that the line makes (``q, k, v = ...`` names the
parts); else the last part of the module's path; else the operation. Repeated names get ``_2``, ``_3`` and so on.
"""

from __future__ import annotations

import builtins
import keyword
import linecache
import operator
import re
from collections.abc import Iterator

from torch import fx

_ASSIGNMENT = re.compile(r"\s*([A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)*)\s*(?::[^=()]+)?(?:[-+*/@&|]|\*\*|//)?=(?!=)")
_RESERVED = {*keyword.kwlist, *dir(builtins), "self", "torch", "nn", "math", "operator", "F", "inf", "nan", "autopipe"}
_OPERATIONS = {"truediv": "div", "and_": "and_", "or_": "or_"}


def rename(graph: fx.Graph) -> None:
    """Name every node of a recorded graph anew. Inputs keep their names."""
    taken = {node.name for node in graph.nodes if node.op in ("placeholder", "output")}
    names = dict(_assigned(graph))
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        node.name = _unique(names.get(node) or _own_name(node), taken)
    graph._graph_namespace._used_names.update(taken)


def _assigned(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    """Give the nodes that the user's code assigns to a variable, and the variable."""
    visits: dict[int, list[fx.Node]] = {}  # user's frame -> nodes of the line that it is on
    ended: list[list[fx.Node]] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or "source" not in node.meta:
            continue
        visit = visits.setdefault(node.meta["frame"], [])
        if visit and visit[-1].meta["source"] != node.meta["source"]:
            ended.append(visit)
            visit = visits[node.meta["frame"]] = []
        visit.append(node)
    for visit in (*ended, *visits.values()):
        match = _ASSIGNMENT.match(linecache.getline(*visit[-1].meta["source"]))
        if match is None:
            continue
        targets = [name.strip() for name in match.group(1).split(",")]
        if len(targets) == 1:
            yield visit[-1], targets[0]
            continue
        for node in visit:
            index = node.args[1] if is_part(node) else None
            if isinstance(index, int) and index < len(targets) and node.args[0] is visit[-1].args[0]:
                yield node, targets[index]


def is_part(node: fx.Node) -> bool:
    """Tell whether a node takes one tensor out of the tuple that a call returned."""
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[0], fx.Node)
        and "val" not in node.args[0].meta
    )


def _own_name(node: fx.Node) -> str:
    if node.op in ("call_module", "get_attr"):
        parts = str(node.target).split(".")
        if parts[-1].isdigit() and len(parts) > 1:
            return "_".join(parts[-2:])
        return "_".join(parts[-2:]) if node.op == "get_attr" else parts[-1]
    if is_part(node):
        producer = node.args[0]
        assert isinstance(producer, fx.Node)
        return f"{producer.name}_{node.args[1]}"
    if node.target is getattr:
        return str(node.args[1])
    owner = getattr(node.target, "__self__", None)
    if isinstance(owner, type) and getattr(node.target, "__name__", "") == "apply":
        return owner.__name__.lower()
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "value")
    return _OPERATIONS.get(name, name)


def _unique(name: str, taken: set[str]) -> str:
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    name = name.strip("_") or "value"
    if name[0].isdigit():
        name = f"value_{name}"
    if name in _RESERVED:
        name = f"{name}_"
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    taken.add(candidate)
    return candidate
