"""Convert symbolic sizes, which may differ from batch to batch, to nodes of the graph and to text.

A symbolic integer that the model's Python computed (``x.shape[0] * 16``) is an expression of a few symbols, each of
which is one dimension of one tensor of the batch. If a call takes one, the arithmetic is written into the graph,
starting from ``input.size(dimension)``, so that every stage can compute it from its own copy of the batch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

_TWO = {
    "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod,
    "IntTrueDiv": operator.truediv, "FloatTrueDiv": operator.truediv, "Pow": operator.pow, "PowByNatural": operator.pow,
    "FloatPow": operator.pow, "LShift": operator.lshift, "RShift": operator.rshift,
}  # fmt: skip
_ONE: dict[str, Callable[..., Any]] = {
    "ToFloat": float, "TruncToInt": math.trunc, "FloorToInt": math.floor, "CeilToInt": math.ceil,
    "RoundToInt": round, "OpaqueUnaryFn_sqrt": math.sqrt, "OpaqueUnaryFn_log": math.log, "OpaqueUnaryFn_exp": math.exp,
    "OpaqueUnaryFn_log2": math.log2, "floor": math.floor, "ceiling": math.ceil, "Abs": abs,
}  # fmt: skip
_COMPARISONS = {
    "Equality": operator.eq, "Unequality": operator.ne, "StrictLessThan": operator.lt, "LessThan": operator.le,
    "StrictGreaterThan": operator.gt, "GreaterThan": operator.ge,
}  # fmt: skip
_MANY: dict[str, Callable[..., Any]] = {"Max": max, "Min": min}
_TEXT = {"FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%", "Pow": "**", "PowByNatural": "**"}


@dataclass
class Symbols:
    """The symbols of one recording."""

    shape_env: ShapeEnv
    source: dict[Any, tuple[fx.Node, int]] = field(default_factory=dict)  # symbol -> (node of the input, dimension)
    names: dict[Any, str] = field(default_factory=dict)  # symbol -> ``s0``
    # as ``source``, for a data-dependent size, such as the number of rows that a mask selects
    made_by: dict[Any, tuple[fx.Node, int]] = field(default_factory=dict)
    _expressions: dict[Any, Any] = field(default_factory=dict)

    def declare(self, node: fx.Node, value: Tensor) -> None:
        """Register the symbolic dimensions of an input; the first input with a symbol is its source."""
        for dimension, size in enumerate(value.shape):
            symbol = size.node.expr if isinstance(size, torch.SymInt) else None
            if _is_symbol(symbol) and symbol not in self.source:
                self.source[symbol] = node, dimension
                self.names[symbol] = f"s{len(self.names)}"

    def declare_made(self, node: fx.Node, value: Tensor) -> list[tuple[Any, int]]:
        """Register the sizes that a call defines (how many rows a mask selects): (symbol, dimension) of each."""
        factors: list[tuple[Any, int]] = []
        for dimension, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and _is_symbol(size.node.expr):
                symbol = size.node.expr
                if symbol not in self.source and symbol not in self.made_by and symbol not in self._expressions:
                    self.made_by[symbol] = node, dimension
                    factors.append((symbol, dimension))
        return factors

    def bind(self, expression: Any, node: fx.Node) -> None:
        """Register ``node`` as the value of ``expression``."""
        self._expressions.setdefault(expression, node)

    def read_from(self, symbol: Any) -> fx.Node | None:
        """Return the call that read a number from a tensor, or None for another kind of symbol."""
        node = self._expressions.get(symbol)
        return node if isinstance(node, fx.Node) else None

    def simplified(self, expression: Any) -> Any:
        """Return the expression with the known facts about its symbols applied."""
        return self.shape_env.replace(expression)

    def node(self, expression: Any, call: Callable[[str, Any, tuple[Any, ...]], fx.Node]) -> Any:
        """Return a number, or the node that computes the expression; ``call(kind, target, args)`` creates nodes.

        Raises: KeyError with the name of a function that has no plain counterpart.
        """
        expression = self.simplified(expression)
        if expression.is_Integer:
            return int(expression)
        if expression.is_number:
            return float(expression)
        if expression not in self._expressions:
            self._expressions[expression] = self._compute(expression, call)
        return self._expressions[expression]

    def _compute(self, expression: Any, call: Callable[[str, Any, tuple[Any, ...]], fx.Node]) -> Any:
        if expression.is_Symbol:
            node, dimension = self.source.get(expression) or self.made_by[expression]
            return call("call_method", "size", (node, dimension))
        kind = type(expression).__name__
        args = [self.node(arg, call) for arg in expression.args]
        if expression.is_Add or expression.is_Mul:
            target = operator.add if expression.is_Add else operator.mul
            total = args[0]
            for arg in args[1:]:
                total = call("call_function", target, (total, arg))
            return total
        if kind in _TWO:
            return call("call_function", _TWO[kind], (args[0], args[1]))
        if kind in _COMPARISONS:
            return call("call_function", _COMPARISONS[kind], (args[0], args[1]))
        if kind in _ONE:
            return call("call_function", _ONE[kind], (args[0],))
        if kind in _MANY:
            return call("call_function", _MANY[kind], tuple(args))
        raise KeyError(kind)

    def text(self, size: int | torch.SymInt) -> int | str | None:
        """Return a dimension for a ``TensorSpec``: a number, Python integer arithmetic, or None."""
        if isinstance(size, int):
            return size
        expression = self.simplified(size.node.expr)
        if expression.is_Integer:
            return int(expression)
        return _printed(expression, self.names)


def _printed(expression: Any, names: Mapping[Any, str]) -> str | None:
    if expression.is_Integer:
        return str(int(expression))
    if expression.is_Symbol:
        return names.get(expression)
    parts = [_printed(arg, names) for arg in expression.args]
    if None in parts:
        return None
    wrapped = [part if part.isalnum() else f"({part})" for part in parts if part is not None]
    kind = type(expression).__name__
    if expression.is_Add:
        return "+".join(wrapped)
    if expression.is_Mul:
        return "*".join(sorted(wrapped, key=lambda part: part[:1].isdigit() or part.startswith("(-")))
    if kind in _TEXT and not (kind == "Pow" and expression.args[1].is_negative):
        return f"{wrapped[0]}{_TEXT[kind]}{wrapped[1]}"
    return None


def _is_symbol(expression: Any) -> bool:
    """Return whether an expression is one symbol. sympy takes long to import: a number needs none of it."""
    return bool(getattr(expression, "is_Symbol", False))
