"""Rewrite the graph of a member so that it computes its own positions between the calls of the axes.

Values are added where positions are exchanged: ``NAME_gathered`` is a value with the positions of all members,
``NAME_rows`` this member's positions of a value that all have, and ``NAME_shared`` a value without positions that
calls of own positions read.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from autopipe import sequence, team
from autopipe.ir.graph import Node, Symbol
from autopipe.ir.tensor import TensorSpec
from autopipe.team import STAGE
from autopipe.trace.record.argument_text import arguments_text
from autopipe.trace.record.targets import qualified_name
from autopipe.trace.result import Capture
from autopipe.trace.teams.arguments import Arguments, dropout_rate, floor_divided, rewritten
from autopipe.trace.teams.positions import FEWEST, Place, Positions

_OF_ROWS: dict[Any, Callable[..., Any]] = {
    team.summed: sequence.summed_rows,
    team.summed_linear: sequence.summed_rows_linear,
    team.summed_addmm: sequence.summed_rows_addmm,
    team.summed_heads: sequence.summed_rows_heads,
    team.looked_up: sequence.looked_up_rows,
}
"""The call of a sum over the team -> the call that returns a member's positions of it."""


def by_position(member: Capture, positions: Positions) -> Capture:
    """Return the capture of a member that has its own positions. ``member``: from ``of_team``, of the same model."""
    return _Divider(member, positions).capture()


class _Divider:
    def __init__(self, member: Capture, positions: Positions) -> None:
        self._of, self._positions, self._size = member, positions, member.team
        self._described = {node.name: node for node in member.graph.nodes}
        self._specs = {entry.name: entry.spec for entry in member.graph.inputs}
        self._specs |= {node.name: node.spec for node in member.graph.nodes if node.spec is not None}
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}  # of the member -> of its positions
        self._added: dict[tuple[str, str, int | None], fx.Node] = {}  # (value, what was added for it, a length)
        self._inputs: dict[str, fx.Node] = {}
        self._nodes: list[Node] = []
        self._evaluation: dict[str, Arguments] = {}

    def capture(self) -> Capture:
        for node in self._of.module.graph.nodes:
            self._copy(node)
        graph, symbols = self._of.graph, self._positions.symbols
        graph = dataclasses.replace(
            graph,
            nodes=tuple(self._nodes),
            partial=tuple(dict.fromkeys((*graph.partial, *self._positions.partial))),
            symbols=tuple(self._holding(s) if s.name in symbols else s for s in graph.symbols),
        )
        module = fx.GraphModule(self._of.module, self._graph, type(self._of.module).__name__)
        described = {node.name: node for node in graph.nodes}
        for node in module.graph.nodes:
            if node.name in described:
                node.meta["node"] = described[node.name]
        return dataclasses.replace(self._of, graph=graph, module=module, evaluation=self._evaluation)

    def _holding(self, symbol: Symbol) -> Symbol:
        """Return a size of the batch with the values that the members can divide."""
        return dataclasses.replace(symbol, multiple=self._size, low=max(symbol.low, FEWEST * self._size))

    def _copy(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            self._values[node] = self._graph.node_copy(node, lambda value: self._values[value])
            if node.op == "placeholder":
                self._inputs[node.name] = self._values[node]
            return
        if node.op == "output":
            self._graph.output(fx.map_arg(node.args[0], self._complete))
            return
        leaf = self._positions.leaves.get(node.name)
        target, arguments = self._call(node, leaf, node.args, node.kwargs)
        op, (args, kwargs) = node.op if target is node.target else "call_function", arguments
        call = self._graph.create_node(op, target, args, kwargs, name=node.name)
        call.meta = {key: entry for key, entry in node.meta.items() if key != "node"}
        self._values[node] = call
        evaluated = self._of.evaluation.get(node.name)
        if evaluated is not None or target is sequence.dropped_rows:
            of_evaluation = evaluated or (node.args, node.kwargs)
            self._evaluation[node.name] = self._call(node, leaf, *of_evaluation, training=False)[1]
        if node.name in self._described:
            self._describe(call, self._described[node.name], leaf, None if target is node.target else target)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node, leaf: int | None, args: Any, kwargs: Any, *, training: bool = True) -> Any:
        """Return what a call of a member becomes: the target, and its arguments."""
        border = self._border(node)
        if node.target is team.entered and args[1].name in self._positions.leaves:
            value = args[1]
            return sequence.entered_rows, ((STAGE, self._values[value], self._rows(value.name)), {})
        if border is not None:
            args, kwargs = fx.map_arg(args, self._complete), dict(fx.map_arg(kwargs, self._complete))
            rows = self._rows(border)
            count = 3 if node.target in (team.looked_up, team.summed_heads) else len(args)
            return _OF_ROWS[node.target], ((*args[:count], rows, *args[count:]), kwargs)
        if leaf is None or node.name not in self._described or node.target in _OF_ROWS:
            return node.target, (fx.map_arg(args, self._complete), dict(fx.map_arg(kwargs, self._complete)))
        if node.target is operator.getitem and self._border(args[0]) is not None:
            return node.target, (fx.map_arg(args, lambda value: self._values[value]), {})

        def operand(value: fx.Node) -> fx.Node:
            return self._operand(value, leaf)

        arguments = fx.map_arg(args, operand), dict(fx.map_arg(kwargs, operand))
        for rewrite in self._positions.rewrites.get(node.name, ()):
            arguments = rewritten(arguments, rewrite.path, self._divided)
        if self._described[node.name].num_random:
            return self._dropout(node, arguments, training)
        return node.target, arguments

    def _border(self, node: Any) -> str | None:
        """Return the value that a sum returns by position; None for another call."""
        if not isinstance(node, fx.Node) or node.target not in _OF_ROWS:
            return None
        names = [node.name]
        if node.target is team.summed_heads:
            names = [user.name for user in node.users]
        return next((name for name in names if name in self._positions.leaves), None)

    def _dropout(self, node: fx.Node, arguments: Arguments, training: bool) -> Any:
        args, kwargs = arguments
        rate = dropout_rate(node, self._of.module, arguments) if training else 0.0
        value = args[0] if args else kwargs["input"]
        return sequence.dropped_rows, ((STAGE, value, rate, self._rows(node.name)), {})

    def _divided(self, count: Any) -> Any:
        """Return a size divided by the members."""
        if not isinstance(count, fx.Node):
            return count // self._size

        def divide(name: str) -> fx.Node:
            arguments = (count, self._size)
            call = self._graph.create_node("call_function", operator.floordiv, arguments, name=name)
            self._add(call, self._described.get(count.name), None)
            return call

        return self._once(count.name, "of_positions", divide)

    # --- values -------------------------------------------------------------------------------------------------------

    def _rows(self, name: str, leaf: int | None = None) -> Any:
        """Return where a value has its positions, as an argument of ``autopipe.sequence``."""
        place: Place = self._positions.places[name, self._positions.leaves[name] if leaf is None else leaf]
        if place.length is None:
            return place.dimension
        return place.dimension, self._size_of(place.length) if isinstance(place.length, Symbol) else place.length

    def _size_of(self, symbol: Symbol) -> fx.Node:
        arguments = self._inputs[symbol.input], symbol.dimension
        for node in (*self._inputs[symbol.input].users,):
            if node.op == "call_method" and node.target == "size" and node.args == arguments:
                return node

        def read(name: str) -> fx.Node:
            call = self._graph.create_node("call_method", "size", arguments, name=name)
            self._add(call, None, None)
            return call

        return self._once(symbol.input, f"size_{symbol.dimension}", read)

    def _complete(self, value: fx.Node) -> fx.Node:
        """Return a value with all positions."""
        leaf = self._positions.leaves.get(value.name)
        if leaf is None:
            return self._values[value]
        return self._exchanged(value, "gathered", sequence.gathered, self._values[value], leaf)

    def _operand(self, value: fx.Node, leaf: int) -> fx.Node:
        """Return a value as a call of own positions reads it."""
        own = self._positions.leaves.get(value.name)
        if own == leaf:
            return self._values[value]
        complete = self._complete(value)
        if value.op == "get_attr" or value.name not in self._specs:
            return complete
        if (value.name, leaf) in self._positions.places:
            return self._exchanged(value, "rows", sequence.own_rows, complete, leaf)
        if self._specs[value.name].requires_grad:
            return self._exchanged(value, "shared", team.entered, complete)
        return complete

    def _exchanged(
        self, value: fx.Node, what: str, function: Any, operand: fx.Node, leaf: int | None = None
    ) -> fx.Node:
        """Return what an exchange makes of a value. ``leaf``: the length whose positions are exchanged."""

        def add(name: str) -> fx.Node:
            rows = () if leaf is None else (self._rows(value.name, leaf),)
            arguments: Any = (STAGE, operand, *rows)
            call = self._graph.create_node("call_function", function, arguments, name=name)
            call.meta = {key: entry for key, entry in value.meta.items() if key not in ("random", "node")}
            spec: TensorSpec = self._specs[value.name]
            if function is sequence.own_rows and leaf is not None:
                spec = self._local(spec, self._positions.places[value.name, leaf])
            storage = value.name if function is team.entered else ""
            self._add(call, self._described.get(value.name), spec, storage)
            return call

        return self._once(value.name, what, add, leaf)

    def _once(self, name: str, what: str, add: Callable[[str], fx.Node], leaf: int | None = None) -> fx.Node:
        """Return the node ``NAME_WHAT``, which ``add`` adds the first time."""
        key = name, what, leaf
        if key not in self._added:
            self._added[key] = add(f"{name}_{what}")
        return self._added[key]

    # --- descriptions -------------------------------------------------------------------------------------------------

    def _local(self, spec: TensorSpec, place: Place) -> TensorSpec:
        shape = list(spec.shape)
        shape[place.dimension] = floor_divided(shape[place.dimension], self._size)
        return dataclasses.replace(spec, shape=tuple(shape))

    def _describe(self, call: fx.Node, about: Node, leaf: int | None, target: Any) -> None:
        """Describe a call of the member. ``target``: what it calls instead; None for the same."""
        spec = about.spec
        if leaf is not None and spec is not None:
            spec = self._local(spec, self._positions.places[call.name, leaf])
        module = self._of.module.get_submodule(str(call.target)) if call.op == "call_module" else None
        self._nodes.append(
            dataclasses.replace(
                about,
                kind=call.op,
                target=about.target if target is None else qualified_name(target),
                inputs=tuple(value.name for value in call.all_input_nodes if value.op != "get_attr"),
                spec=spec,
                arguments=arguments_text(call, self._of.constants, module),
            )
        )

    def _add(self, call: fx.Node, about: Node | None, spec: TensorSpec | None, storage: str = "") -> None:
        """Describe a call that is added for a value: it belongs to the module that makes the value.

        ``about``: the value; None for an input.
        """
        about = about or Node(call.name, "call_function", "", (), None, input_only=True)
        self._nodes.append(
            Node(
                call.name,
                call.op,
                call.target if isinstance(call.target, str) else qualified_name(call.target),
                tuple(value.name for value in call.all_input_nodes if value.op != "get_attr"),
                spec,
                arguments_text(call, self._of.constants, None),
                storage=storage,
                input_only=about.input_only,
                checkpoint=about.checkpoint,
                context=about.context,
                module_path=about.module_path,
                module_type=about.module_type,
                source=about.source,
                own_source=about.own_source,
            )
        )
