"""Name values as a reader of the user's file would expect.

A value takes the name on the left of the user's line if it is the last value of that line. The value may come from a
function that the line calls, if its ``return`` computes it; ``q, k, v = ...`` names the parts. Otherwise a value takes
the last part of the module's path, or else the name of the operation. Repeated names get ``_2``, ``_3`` and so on.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import linecache
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

_ASSIGNMENT = re.compile(r"\s*([A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)*)\s*(?::[^=()]+)?(?:[-+*/@&|]|\*\*|//)?=(?!=)")
_RESERVED = {*keyword.kwlist, *dir(builtins), "self", "torch", "nn", "math", "operator", "F", "inf", "nan", "autopipe"}
_OPERATIONS = {"truediv": "div", "and_": "and_", "or_": "or_"}


def rename(graph: fx.Graph) -> None:
    """Rename every node of a recorded graph. Inputs keep their names."""
    taken = {node.name for node in graph.nodes if node.op in ("placeholder", "output")}
    names = dict(_assigned(graph))
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        node.name = _unique(names.get(node) or _own_name(node), taken)
    graph._graph_namespace._used_names.update(taken)


@dataclass(frozen=True, slots=True)
class _Step:
    """A call made while the user's code executes one line."""

    node: fx.Node
    source: tuple[str, int]
    at: int  # the instruction
    own: bool  # on the line itself, rather than in a function that it calls


def _assigned(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    """Yield the nodes that the user's code assigns to a variable, with the name of the variable."""
    visits: dict[int, list[_Step]] = {}  # user frame -> the calls made on its current line
    ended: list[list[_Step]] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or "source" not in node.meta:
            continue
        own = node.meta["source"], node.meta["frame"], node.meta.get("at", 0)
        for source, frame, at in (own, node.meta["caller"]) if "caller" in node.meta else (own,):
            visit = visits.setdefault(frame, [])
            if visit and visit[-1].source != source:
                ended.append(visit)
                visit = visits[frame] = []
            visit.append(_Step(node, source, at, frame == own[1]))
    assignments = [
        (visit, _ASSIGNMENT.match(linecache.getline(*visit[-1].source))) for visit in (*ended, *visits.values())
    ]
    for visit, match in sorted(
        assignments, key=lambda entry: entry[0][-1].own
    ):  # the calls of the own line come last and take precedence
        if match is not None:
            yield from _named(visit, [name.strip() for name in match.group(1).split(",")])


def _named(visit: list[_Step], targets: list[str]) -> Iterator[tuple[fx.Node, str]]:
    """Yield the value that a line assigns: the result of its last instruction, for each execution of the line."""
    last = visit[-1]
    if len(targets) == 1:
        for step, following in zip(visit, [*visit[1:], None], strict=True):
            if step is not last and (step.at != last.at or step.own != last.own or not _is_value(step.node)):
                continue
            if step.own or _is_returned(step.node, following.node if following else None):
                yield step.node, targets[0]
        return
    for step in visit:
        index = step.node.args[1] if is_part(step.node) else None
        if step.own and isinstance(index, int) and index < len(targets) and step.node.args[0] is last.node.args[0]:
            yield step.node, targets[index]


def _is_value(node: fx.Node) -> bool:
    return "val" in node.meta and not is_part(node)


def _is_returned(node: fx.Node, following: fx.Node | None) -> bool:
    """Return whether a user line is a ``return`` of one value, which this node computes."""
    if following is not None and all(node.meta[key] == following.meta[key] for key in ("frame", "source", "stack")):
        return False
    try:
        tree = ast.parse(linecache.getline(*node.meta["source"]).strip()).body
    except SyntaxError:
        return False
    return len(tree) == 1 and isinstance(tree[0], ast.Return) and not isinstance(tree[0].value, (ast.Tuple, ast.Dict))


def is_part(node: fx.Node) -> bool:
    """Return whether a node selects one tensor from the tuple that a call returned."""
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
        return f"{producer.name.rstrip('_')}_{node.args[1]}"
    if node.target is getattr:
        return str(node.args[1])
    owner = getattr(node.target, "__self__", None)
    if isinstance(owner, type) and getattr(node.target, "__name__", "") == "apply":
        return owner.__name__.lower()
    name = getattr(node.target, "_opname", "") or getattr(node.target, "__name__", node.target)
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
