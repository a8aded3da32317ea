"""The calls of one stage -> statements: which calls stand on one line.

What the user wrote on one line is put on one line again where that changes nothing: the calls follow one another, each
result is read once, by the next, and Python evaluates them in the order in which they were recorded (autograd adds up
gradients in that order). ``a, b = ...`` becomes one assignment again too.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopipe.generate.expression import AUGMENTED
from autopipe.generate.names import unpacked
from autopipe.ir.graph import Node

_LONGEST = 96  # characters of an expression that is made of several calls
_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")


@dataclass
class Statement:
    """One line to be: the call ``node`` with the calls written inside it, or with the parts that it is taken into."""

    node: fx.Node
    inner: list[fx.Node] = field(default_factory=list)
    parts: dict[tuple[object, ...], fx.Node] = field(default_factory=dict)
    targets: ast.Tuple | None = None

    @property
    def nodes(self) -> list[fx.Node]:
        """Every call that it stands for."""
        return [*self.inner, self.node, *self.parts.values()]


def ir(node: fx.Node) -> Node:
    """Return what the graph says of a call."""
    found: Node = node.meta["node"]
    return found


def statements(nodes: Sequence[fx.Node], kept: Iterable[str]) -> list[Statement]:
    """Group calls into statements. ``kept``: values that must have a variable, since other stages read them."""
    # sizes of the batch come first: they depend on no call, and stand where everything can read them
    nodes = [*filter(is_size, nodes), *(node for node in nodes if not is_size(node))]
    inside, named = set(nodes), set(kept)
    users = {node: [user for user in node.users if user in inside] for node in nodes}
    found: list[Statement] = []
    position = 0
    while position < len(nodes):
        node = nodes[position]
        parts, targets = _parts(nodes, position, inside)
        if targets is not None:
            position += len(parts)
        statement = Statement(node, parts=parts, targets=targets)
        _take_in(statement, found, users, named)
        found.append(statement)
        position += 1
    return found


def _take_in(
    statement: Statement, found: list[Statement], users: Mapping[fx.Node, list[fx.Node]], named: set[str]
) -> None:
    """Move the statements just before into this one, as far as they are its arguments, the last one first."""
    length = _length(statement.node)
    for operand in reversed(_operands(statement.node)):
        if not found or found[-1].node is not operand:
            continue  # a variable: when it is read makes no difference
        before = found[-1]
        length += sum(_length(entry) for entry in before.nodes)
        if (
            before.targets is not None
            or length > _LONGEST
            or not _may_move(operand, statement.node, users[operand], named)
        ):
            break
        statement.inner = [*before.nodes, *statement.inner]
        found.pop()


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the calls whose results Python evaluates for this one, in that order, as often as they are read."""
    args = node.args
    if _is_setitem(node):
        args = (node.args[2], node.args[0], node.args[1])
    order: list[fx.Node] = []
    fx.map_arg((args, node.kwargs), order.append)
    return [entry for entry in order if entry.op not in ("placeholder", "get_attr")]


def is_size(node: fx.Node) -> bool:
    """Tell whether a call reads a size of the batch."""
    source = node.args[0] if node.args else None
    return (
        node.op == "call_method"
        and node.target == "size"
        and isinstance(source, fx.Node)
        and source.op == "placeholder"
    )


def _length(node: fx.Node) -> int:
    return len(str(node.target)) + 2 + 4 * (len(node.args) + len(node.kwargs)) if node.op != "call_function" else 12


def _may_move(node: fx.Node, into: fx.Node, users: Sequence[fx.Node], named: set[str]) -> bool:
    if users != [into] or node.name in named or len([e for e in _operands(into) if e is node]) != 1:
        return False
    about = ir(node)
    if about.mutates or about.buffers_written or about.num_random or _is_setitem(node):
        return False
    if node.op == "call_function" and node.target in AUGMENTED:
        return False
    if _container(node) and _container(node) == _container(into):
        return False  # one layer of a Sequential a line
    same = all(node.meta.get(key) == into.meta.get(key) for key in ("source", "frame", "grad", "autocast"))
    return same and scope_of(node) == scope_of(into)


def _container(node: fx.Node) -> str:
    """Return the path of the Sequential that calls a module, or ""."""
    stack = node.meta.get("stack", ())
    calls = node.op == "call_module" and len(stack) > 1 and stack[-2][1] in _CONTAINERS
    return str(stack[-2][0]) if calls else ""


def _is_setitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (operator.setitem, operator.delitem)


def _parts(
    nodes: Sequence[fx.Node], position: int, inside: set[fx.Node]
) -> tuple[dict[tuple[object, ...], fx.Node], ast.Tuple | None]:
    """Return the parts that the calls behind ``position`` take out of its result, if the user's line names them all."""
    producer = nodes[position]
    if "val" in producer.meta or "source" not in producer.meta:
        return {}, None
    targets = unpacked(producer.meta["source"])
    if targets is None:
        return {}, None
    paths: dict[fx.Node, tuple[object, ...]] = {producer: ()}
    for node in nodes[position + 1 :]:
        holder = node.args[0] if node.target is operator.getitem else None
        if not isinstance(holder, fx.Node) or holder not in paths or "val" in holder.meta:
            break
        paths[node] = (*paths[holder], node.args[1])
    shape = dict(_leaves(targets))
    for node, path in paths.items():
        # a tuple is only taken apart when all that is read of it is read here
        if "val" in node.meta and path not in shape:
            return {}, None
        if "val" not in node.meta and any(user not in paths for user in node.users if user in inside):
            return {}, None
    parts = {path: node for node, path in paths.items() if node is not producer}
    return (parts, targets) if parts else ({}, None)


def _leaves(target: ast.expr, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    if isinstance(target, ast.Tuple):
        for index, item in enumerate(target.elts):
            yield from _leaves(item, (*path, index))
    elif isinstance(target, ast.Name):
        yield path, target.id


def scope_of(node: fx.Node) -> tuple[str, str, int]:
    """Return path, class and number of the call of the user's module in whose forward a call is written."""
    stack = list(node.meta.get("stack", ()))
    if node.op == "call_module" and len(stack) > 1:
        stack.pop()
    while len(stack) > 1 and stack[-1][1] in _CONTAINERS:
        stack.pop()
    path, kind, *which = stack[-1] if stack else ("", "", 0)
    return path, kind, which[0] if which else 0
