"""Group the calls of one stage into statements.

Calls from one line of the user's code are written as one line again if that changes nothing: they are consecutive, each
result is read once, by the next call, and Python evaluates them in the recorded order (in which autograd accumulates
gradients). An unpacking ``a, b = ...`` is written as one assignment again.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import fx

from autopipe.generate.names import unpacked
from autopipe.ir.graph import Node

_LONGEST = 96  # characters of an expression of several calls
_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")


@dataclass
class Statement:
    """One line of the stage file."""

    node: fx.Node  # the outermost call
    inner: list[fx.Node] = field(default_factory=list)  # the calls written inside it, in the order of evaluation
    #: The calls that unpack the result, by position in ``targets``: (1, 0) is the first element of the second.
    parts: dict[tuple[object, ...], fx.Node] = field(default_factory=dict)
    targets: ast.Tuple | None = None  # the user's names on the left of an unpacking

    @property
    def nodes(self) -> list[fx.Node]:
        """All calls of the line."""
        return [*self.inner, self.node, *self.parts.values()]


def ir(node: fx.Node) -> Node:
    """Return the node of the graph for a call."""
    about: Node = node.meta["node"]
    return about


def statements(
    nodes: Sequence[fx.Node], kept: Iterable[str], units: Mapping[str, int] = MappingProxyType({})
) -> list[Statement]:
    """Group calls into statements.

    ``kept``: values that need a variable because other stages read them. ``units``: by value, the number of its
    recompute unit; no statement has calls of two.
    """
    # sizes of the batch come first, because they depend on no call and any call may read them
    ordered = [*filter(is_size, nodes), *(node for node in nodes if not is_size(node))]
    return _Grouping(ordered, kept, units).statements()


class _Grouping:
    def __init__(self, nodes: Sequence[fx.Node], kept: Iterable[str], units: Mapping[str, int]) -> None:
        self.nodes, self.kept, self.units = nodes, set(kept), units
        inside = set(nodes)
        self.readers = {node: [user for user in node.users if user in inside] for node in nodes}
        self.result: list[Statement] = []
        self.unpacked: set[fx.Node] = set()  # calls that are part of an unpacking

    def statements(self) -> list[Statement]:
        for position, node in enumerate(self.nodes):
            if node in self.unpacked or self._is_written_in_place(node):
                continue
            statement = Statement(node)
            statement.parts, statement.targets = self._parts(position)
            self.unpacked.update(statement.parts.values())
            self._take_in(statement)
            self.result.append(statement)
        return self.result

    def _is_written_in_place(self, node: fx.Node) -> bool:
        """Return whether a call is written where its result is read: ``batch * 4``, or a ``state[0]`` read once."""
        if is_arithmetic(node):
            return True
        if not is_part(node) or node in self.unpacked or node.name in self.kept:
            return False
        readers = self.readers.get(node, [])
        return len(readers) == 1 and _count(readers[0], node) == 1

    def _take_in(self, statement: Statement) -> None:
        """Move the preceding statements into this one, the last one first, as far as they are its arguments."""
        length, more = _length(statement.node), True
        for operand in reversed(_operands(statement.node)):
            if self._is_written_in_place(operand):
                statement.inner = [*self._chain(operand), *statement.inner]
                continue
            if not more or not self.result or self.result[-1].node is not operand:
                continue  # a variable: the time of the read does not matter
            before = self.result[-1]
            length += sum(_length(entry) for entry in before.nodes)
            more = before.targets is None and length <= _LONGEST and self._may_move(operand, statement.node)
            if more:
                statement.inner = [*before.nodes, *statement.inner]
                self.result.pop()

    def _chain(self, part: fx.Node) -> list[fx.Node]:
        """Return a call after those of its arguments that are written in place too."""
        inner = filter(self._is_written_in_place, _operands(part))
        return [*(node for holder in inner for node in self._chain(holder)), part]

    def _may_move(self, node: fx.Node, into: fx.Node) -> bool:
        if self.readers.get(node) != [into] or node.name in self.kept or _count(into, node) != 1:
            return False
        if self.units.get(node.name) != self.units.get(into.name):
            return False
        about = ir(node)
        if about.num_random or _is_setitem(node) or (about.mutates and node.op != "call_module"):
            return False
        if _container(node) and _container(node) == _container(into):
            return False  # one layer of a list per line
        same = all(node.meta.get(key) == into.meta.get(key) for key in ("source", "frame", "grad", "autocast"))
        return same and scope_of(node) == scope_of(into)

    def _parts(self, position: int) -> tuple[dict[tuple[object, ...], fx.Node], ast.Tuple | None]:
        """Return the calls after ``position`` that unpack its result, and the targets of the user's line.

        The targets are None if the line is not an unpacking, or unpacks another value that the line computes.
        """
        producer = self.nodes[position]
        if "val" in producer.meta or "source" not in producer.meta or is_part(producer):
            return {}, None
        targets = unpacked(producer.meta["source"])
        if targets is None:
            return {}, None
        names = dict(_leaves(targets))
        paths: dict[fx.Node, tuple[object, ...]] = {producer: ()}
        for node in self.nodes[position + 1 :]:
            holder = node.args[0]
            if not is_part(node) or not isinstance(holder, fx.Node) or holder not in paths:
                break
            if paths[holder] not in names:  # a value that has a name is not unpacked further here
                paths[node] = (*paths[holder], node.args[1])
        parts = {path: node for node, path in paths.items() if path in names}
        for node, path in paths.items():
            if path not in names and ("val" in node.meta or any(user not in paths for user in self.readers[node])):
                return {}, None
            if path not in names and node.meta.get("length") != len(_at(targets, path).elts):
                return {}, None
        return (parts, targets) if parts else ({}, None)


def is_part(node: fx.Node) -> bool:
    """Return whether a call takes one value out of the tuple that another call returned."""
    holder = node.args[0] if node.target is operator.getitem else None
    return isinstance(holder, fx.Node) and "val" not in holder.meta


def _count(node: fx.Node, operand: fx.Node) -> int:
    return sum(entry is operand for entry in _operands(node))


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the calls whose results a call reads, in the order of evaluation, once per read."""
    args = node.args
    if _is_setitem(node):
        args = (node.args[2], node.args[0], node.args[1])
    order: list[fx.Node] = []
    fx.map_arg((args, node.kwargs), order.append)
    return [entry for entry in order if entry.op not in ("placeholder", "get_attr")]


def is_size(node: fx.Node) -> bool:
    """Return whether a call reads a size of the batch."""
    source = node.args[0] if node.args else None
    return (
        node.op == "call_method"
        and node.target == "size"
        and isinstance(source, fx.Node)
        and source.op == "placeholder"
    )


def is_arithmetic(node: fx.Node) -> bool:
    """Return whether a call is arithmetic on sizes of the batch: a number, which can be written anywhere."""
    if node.op != "call_function" or node.target not in (operator.mul, operator.add, operator.sub) or node.kwargs:
        return False
    return all(isinstance(a, int) or (isinstance(a, fx.Node) and (is_size(a) or is_arithmetic(a))) for a in node.args)


def _length(node: fx.Node) -> int:
    return len(str(node.target)) + 2 + 4 * (len(node.args) + len(node.kwargs)) if node.op != "call_function" else 12


def _container(node: fx.Node) -> str:
    """Return the path of the list of layers that contains a module, or ""."""
    path, _, name = str(node.target).rpartition(".")
    return path if node.op == "call_module" and name.isdigit() else ""


def _is_setitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (operator.setitem, operator.delitem)


def _at(targets: ast.Tuple, path: tuple[object, ...]) -> ast.Tuple:
    for index in path:
        inner = targets.elts[index] if isinstance(index, int) and index < len(targets.elts) else None
        if not isinstance(inner, ast.Tuple):
            return ast.Tuple([])
        targets = inner
    return targets


def _leaves(target: ast.expr, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    if isinstance(target, ast.Tuple):
        for index, item in enumerate(target.elts):
            yield from _leaves(item, (*path, index))
    elif isinstance(target, ast.Name):
        yield path, target.id


def scope_of(node: fx.Node) -> tuple[str, str, int]:
    """Return the path, class and call number of the user's module whose forward contains a call."""
    while is_part(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    stack = list(node.meta.get("stack", ()))
    if node.op == "call_module" and len(stack) > 1:
        stack.pop()
    while len(stack) > 1 and stack[-1][1] in _CONTAINERS:
        stack.pop()
    path, kind, *which = stack[-1] if stack else ("", "", 0)
    return path, kind, which[0] if which else 0
