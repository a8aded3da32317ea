"""Compare the graph of one more recording with the graph of the stage code, whatever the names of their values are.

A value is identified by how it is computed: the call, its arguments and the calls that must precede it. So the order of
independent calls does not count, nor do calls whose result nothing uses. Sizes of the stage code are written as
arithmetic; they are computed for the batch at hand.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from autopipe.ir.graph import Graph, Node

_REFERENCE = re.compile(r"%([A-Za-z_]\w*)")
CONSTANT = re.compile(r"\bconstant_\w*:([0-9a-f]{16})\b")
"""A tensor that Python holds, in the text of arguments: its name and the digest of its content."""
_SIZE = re.compile(r"\(%(\w+), (-?\d+)\)")
_OF_BUILTINS = {"float", "int", "max", "min", "abs", "round"}


def first_difference(recorded: Graph, sizes: Mapping[str, int], now: Graph) -> tuple[Node | None, Node | None] | None:
    """Return the first call of each graph that the other does not have, None if both compute the same.

    ``sizes``: of the symbols of ``recorded``; the sizes of ``now`` are numbers.
    """
    numbers: dict[Hashable, int] = {}
    left, right = _Program(recorded, sizes, numbers), _Program(now, {}, numbers)
    if left.results() == right.results():
        return None
    return left.first_without(right), right.first_without(left)


class _Program:
    """A graph with the number of each value: equal numbers, equal computations. ``numbers``: of both graphs."""

    def __init__(self, graph: Graph, sizes: Mapping[str, int], numbers: dict[Hashable, int]) -> None:
        self._graph, self._sizes, self._numbers = graph, sizes, numbers
        self._specs = {entry.name: entry.spec for entry in graph.inputs}
        self._specs |= {node.name: node.spec for node in graph.nodes if node.spec is not None}
        self._staying = [node for node in graph.nodes if node.buffers_written or node.num_random]
        self._size: dict[str, Any] = {}  # node that is a number of sizes -> its value
        self._changing = {entry.name for entry in graph.numbers}  # and what is read from them
        self._ids: dict[str, int] = {entry.name: self._number(("input", entry.name)) for entry in graph.inputs}
        for node in graph.nodes:
            if not self._is_size(node):
                self._ids[node.name] = self._number(self._identity(node))

    def _number(self, identity: Hashable) -> int:
        return self._numbers.setdefault(identity, len(self._numbers))

    def _identity(self, node: Node) -> Hashable:
        text = CONSTANT.sub(r"constant:\1", _REFERENCE.sub(self._reference, node.arguments))
        state = tuple((name, self._graph.parameters[name].requires_grad) for name in node.parameters)
        draws = (node.random_position, node.num_random) if node.num_random else ()
        after = tuple(sorted(self._ids[name] for name in node.after))
        form = self._form(node) if not self._changing.isdisjoint(node.inputs) else ()
        return (node.kind, node.target, text, state, node.buffers, after, draws, node.context, node.checkpoint, form)

    def _form(self, node: Node) -> Hashable:
        """Return the form of the result of a call with a number that changes: with another number, it may differ."""
        if node.spec is None:
            self._changing.add(node.name)
            return ()
        return node.spec.dtype, node.spec.concrete(self._sizes), self._ids.get(node.storage)

    def _reference(self, match: re.Match[str]) -> str:
        name = match[1]
        if name in self._size:
            return repr(self._size[name])
        return f"%{self._ids[name]}" if name in self._ids else match[0]

    def _is_size(self, node: Node) -> bool:
        """Return whether a node computes a number from sizes, and note the number."""
        if node.spec is not None or node.parameters or node.buffers or node.constants:
            return False
        match = _SIZE.fullmatch(node.arguments)
        if node.kind == "call_method" and node.target == "size" and match is not None:
            spec = self._specs.get(match[1])
            if spec is not None:
                self._size[node.name] = spec.concrete(self._sizes)[int(match[2])]
            return spec is not None
        function = _function(node.target)
        if node.kind != "call_function" or function is None or not node.inputs:
            return False
        if not all(name in self._size for name in node.inputs):
            return False
        try:
            arguments = ast.literal_eval(f"[{_REFERENCE.sub(self._reference, node.arguments)[1:-1]}]")
            self._size[node.name] = function(*arguments)
        except (ArithmeticError, SyntaxError, TypeError, ValueError):
            return False
        return True

    def results(self) -> tuple[Any, ...]:
        """Return what identifies what the graph computes: its outputs, and what it writes."""
        written = sorted((self._ids[node.name], node.buffers_written) for node in self._staying)
        return tuple(map(self._ids.get, self._graph.outputs)), written

    def first_without(self, other: _Program) -> Node | None:
        """Return the first call that a result needs and that the other graph does not have."""
        have = set(other._ids.values())
        return next((node for node in self._needed() if self._ids[node.name] not in have), None)

    def _needed(self) -> Iterator[Node]:
        waiting = [*self._graph.outputs, *(node.name for node in self._staying)]
        nodes = {node.name: node for node in self._graph.nodes}
        needed: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name not in needed:
                needed.add(name)
                waiting += (*nodes[name].inputs, *nodes[name].after) if name in nodes else ()
        return (node for node in self._graph.nodes if node.name in needed and node.name in self._ids)


def _function(target: str) -> Any:
    """Return the function of arithmetic of a name, or None."""
    place, _, name = target.rpartition(".")
    if place == "operator":
        return getattr(operator, name, None)
    if place == "math":
        return getattr(math, name, None)
    return getattr(builtins, name) if not place and name in _OF_BUILTINS else None
