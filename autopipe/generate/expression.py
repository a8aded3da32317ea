"""Write one call of the graph as a Python expression, as a programmer would.

Operators are written infix and subscripts as subscripts. Arguments with their default value are left out. Where the
arguments in evaluation mode differ, both are written: ``p if self.training else 0.0``.
"""

from __future__ import annotations

import enum
import functools
import inspect
import keyword
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopipe.errors import TraceError
from autopipe.generate.formatting import Doc, Group
from autopipe.generate.targets import Imports, callable_text
from autopipe.stage import Stage
from autopipe.team import STAGE

ATOM, POWER, UNARY, PRODUCT, SUM, SHIFT, AND, XOR, OR, COMPARISON, CONDITIONAL = range(20, 9, -1)
_INFIX = {
    operator.add: ("+", SUM), operator.sub: ("-", SUM), operator.mul: ("*", PRODUCT), operator.matmul: ("@", PRODUCT),
    operator.truediv: ("/", PRODUCT), operator.floordiv: ("//", PRODUCT), operator.mod: ("%", PRODUCT),
    operator.pow: ("**", POWER), operator.lshift: ("<<", SHIFT), operator.rshift: (">>", SHIFT),
    operator.and_: ("&", AND), operator.xor: ("^", XOR), operator.or_: ("|", OR), operator.eq: ("==", COMPARISON),
    operator.ne: ("!=", COMPARISON), operator.lt: ("<", COMPARISON), operator.le: ("<=", COMPARISON),
    operator.gt: (">", COMPARISON), operator.ge: (">=", COMPARISON),
}  # fmt: skip
_PREFIX = {operator.neg: "-", operator.invert: "~", operator.pos: "+"}
AUGMENTED = {
    operator.iadd: "+=", operator.isub: "-=", operator.imul: "*=", operator.itruediv: "/=", operator.ifloordiv: "//=",
    operator.imod: "%=", operator.ipow: "**=", operator.iand: "&=", operator.ior: "|=", operator.ixor: "^=",
    operator.imatmul: "@=", operator.ilshift: "<<=", operator.irshift: ">>=",
}  # fmt: skip
_IN_STAGE = frozenset(dir(Stage()))


@dataclass(frozen=True, slots=True)
class Expression:
    """A part of the source, with its operator precedence."""

    doc: Doc
    binding: int = ATOM  # the higher, the more tightly it binds

    def within(self, binding: int) -> Doc:
        """Return the expression, in parentheses if its context binds more tightly."""
        return self.doc if self.binding >= binding else (Group("(", (self.doc,), ")", comma=False),)


class Writer:
    """Writes the expressions of one stage."""

    def __init__(
        self, imports: Imports, constants: Mapping[str, Any], evaluation: Mapping[str, Any], device: str
    ) -> None:
        self.imports = imports
        self.constants = constants  # by name
        self.evaluation = evaluation  # by node, its arguments in evaluation mode
        self.device = device  # type of the device of the capture; a literal of it means the stage's device
        self.names: dict[str, Expression] = {}  # value -> the expression that reads it

    def call(self, node: fx.Node) -> Expression:
        """Return the expression of a node's call."""
        args, kwargs = self._arguments(node)
        target = node.target
        if node.op == "call_module":
            return self._called(path_text(str(target)), args, kwargs)
        if node.op == "call_method":
            return self._called((*args[0].within(ATOM), f".{target}"), args[1:], kwargs)
        assert callable(target)
        if target is operator.getitem:
            return Expression((*args[0].within(ATOM), Group("[", self._index(node.args[1]), "]", comma=False)))
        if target is getattr:
            return Expression((*args[0].within(ATOM), f".{node.args[1]}"))
        if target in _PREFIX and not kwargs:
            return Expression((_PREFIX[target], *args[0].within(UNARY)), UNARY)
        if target in _INFIX and len(args) == 2 and not kwargs:
            return self._infix(*_INFIX[target], *args)
        return self._called((callable_text(target, self.imports),), args, kwargs)

    def statement(self, node: fx.Node) -> Doc | None:
        """Return the statement of a call such as ``x[i] = y``; None if the call is an expression."""
        if node.op != "call_function" or node.target not in (operator.setitem, operator.delitem):
            return None
        args, _ = self._arguments(node)
        place = (*args[0].within(ATOM), Group("[", self._index(node.args[1]), "]", comma=False))
        return ("del ", *place) if node.target is operator.delitem else (*place, " = ", *args[2].doc)

    @staticmethod
    def _infix(sign: str, binding: int, left: Expression, right: Expression) -> Expression:
        if binding == POWER:  # right-associative, and binds more tightly than a minus on its left
            doc = (*left.within(POWER + 1), f" {sign} ", *right.within(UNARY))
        elif binding == COMPARISON:  # without parentheses, two would form a chained comparison
            doc = (*left.within(binding + 1), f" {sign} ", *right.within(binding + 1))
        else:
            doc = (*left.within(binding), f" {sign} ", *right.within(binding + 1))
        return Expression(doc, binding)

    @staticmethod
    def _called(head: Doc, args: list[Expression], kwargs: dict[str, Expression]) -> Expression:
        items: list[Doc] = [arg.doc for arg in args]
        plain = {key: value for key, value in kwargs.items() if key.isidentifier() and not keyword.iskeyword(key)}
        items += [(f"{key}=", *value.doc) for key, value in plain.items()]
        rest = tuple((f"{quoted(key)}: ", *value.doc) for key, value in kwargs.items() if key not in plain)
        if rest:
            items.append(("**", Group("{", rest, "}")))
        return Expression((*head, Group("(", tuple(items), ")")))

    # --- arguments ----------------------------------------------------------------------------------------------------

    def _arguments(self, node: fx.Node) -> tuple[list[Expression], dict[str, Expression]]:
        """Return the arguments without those that have default values. Both modes are written where they differ."""
        args, kwargs = self.evaluation.get(node.name, (node.args, node.kwargs))
        to = node.target == "to"
        positional = [
            self._either(ours, theirs, device=to and index == 1)
            for index, (ours, theirs) in enumerate(zip(node.args, args, strict=True))
        ]
        defaults = _defaults(node.target) if node.op == "call_function" else {}
        named = {}
        for key, value in node.kwargs.items():
            other = kwargs[key]
            if key == "_stacklevel" or (key in defaults and _same(value, defaults[key]) and _same(value, other)):
                continue
            named[key] = self._either(value, other, device=key == "device")
        return positional, named

    def _either(self, training: Any, evaluation: Any, *, device: bool) -> Expression:
        if type(training) is not type(evaluation) or isinstance(training, (bool, int, float, str, type(None))):
            if not _same(training, evaluation):
                return self._conditional(training, evaluation)
        elif isinstance(training, (list, tuple)) and len(training) == len(evaluation) and training:
            pairs = zip(training, evaluation, strict=True)
            return _sequence(type(training), [self._either(a, b, device=False) for a, b in pairs])
        return self.value(training, device=device)

    def _conditional(self, training: Any, evaluation: Any) -> Expression:
        if (training, evaluation) == (True, False):
            return Expression(("self.training",))
        if (training, evaluation) == (False, True):
            return Expression(("not self.training",), CONDITIONAL)
        ours, theirs = self.value(training).within(COMPARISON), self.value(evaluation).within(COMPARISON)
        return Expression((*ours, " if self.training else ", *theirs), CONDITIONAL)

    def value(self, value: Any, *, device: bool = False) -> Expression:
        """Return an argument. ``device``: whether a string names a device here.

        Raises: TraceError for a value that cannot be written as Python source.
        """
        if isinstance(value, fx.Node):
            return self._node(value)
        if value is STAGE:
            return Expression(("self",))
        if isinstance(value, torch.device) or (device and isinstance(value, str)):
            return self._device(torch.device(value))
        if isinstance(value, slice):
            return self._called(("slice",), [self.value(v) for v in (value.start, value.stop, value.step)], {})
        if isinstance(value, (torch.Size, tuple)) and not hasattr(value, "_fields"):
            return _sequence(tuple, [self.value(item) for item in value])
        if isinstance(value, list):
            return _sequence(list, [self.value(item) for item in value])
        if isinstance(value, dict):
            items = tuple((*self.value(k).doc, ": ", *self.value(v).doc) for k, v in value.items())
            return Expression((Group("{", items, "}"),))
        return self._scalar(value)

    def _scalar(self, value: Any) -> Expression:
        if isinstance(value, enum.Enum):
            return Expression((f"{callable_text(type(value), self.imports)}.{value.name}",))
        if value is None or value is Ellipsis or isinstance(value, bool):
            return Expression(("..." if value is Ellipsis else repr(value),))
        if isinstance(value, (int, float)) and type(value) in (int, float):
            return self._number(value)
        if isinstance(value, complex):
            return self._called(("complex",), [self._number(value.real), self._number(value.imag)], {})
        if isinstance(value, str):
            return Expression((quoted(value),))
        if isinstance(value, (bytes, range)):
            return Expression((repr(value),))
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            self.imports.module("torch")
            return Expression((repr(value),))
        if isinstance(value, functools.partial):
            head = (f"{self.imports.module('functools')}.partial",)
            args = [self.value(value.func), *(self.value(arg) for arg in value.args)]
            return self._called(head, args, {key: self.value(item) for key, item in value.keywords.items()})
        if hasattr(value, "_fields"):
            return self._called((callable_text(type(value), self.imports),), [self.value(item) for item in value], {})
        if callable(value) and hasattr(value, "__qualname__"):
            return Expression((callable_text(value, self.imports),))
        raise TraceError(
            f"an argument of type {type(value).__name__} cannot be written as Python source: {str(value)[:60]}",
            remedy="pass plain numbers, strings, dtypes or tensors to torch's functions",
        )

    @staticmethod
    def _number(value: float) -> Expression:
        if isinstance(value, float) and not math.isfinite(value):
            return Expression((f'float("{value}")',))
        return Expression((repr(value),), ATOM if math.copysign(1, value) > 0 else UNARY)

    def _node(self, node: fx.Node) -> Expression:
        if node.op == "get_attr":
            target = str(node.target)
            if target in self.constants:
                return Expression((f"self.{target}",))
            return Expression(path_text(target))
        return self.names[node.name]

    def _device(self, device: torch.device) -> Expression:
        if device.type == self.device:
            return Expression((f"{self.imports.name('autopipe.stage', 'device_of')}(self)",))
        self.imports.module("torch")
        return Expression((f"torch.device({quoted(str(device))})",))

    def _index(self, index: Any) -> tuple[Doc, ...]:
        items = index if isinstance(index, tuple) and index else (index,)
        docs = []
        for item in items:
            if isinstance(item, slice):
                parts = (item.start, item.stop) if item.step is None else (item.start, item.stop, item.step)
                doc: Doc = ()
                for number, part in enumerate(parts):
                    doc += (*((":",) if number else ()), *(() if part is None else self.value(part).within(SUM)))
                docs.append(doc)
            else:
                docs.append(self.value(item).doc)
        if isinstance(index, tuple) and len(index) == 1:
            docs[0] = (*docs[0], ",")
        return tuple(docs)


def _sequence(kind: type, items: list[Expression]) -> Expression:
    docs = tuple(item.doc for item in items)
    if kind is list:
        return Expression((Group("[", docs, "]"),))
    if len(docs) == 1:
        return Expression((Group("(", ((*docs[0], ","),), ")", comma=False),))
    return Expression((Group("(", docs, ")"),))


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, fx.Node) or isinstance(right, fx.Node):
        return left is right
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right) or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


@functools.cache
def _defaults(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the default values that a Python function declares; {} for a built-in function."""
    if not inspect.isfunction(target):
        return {}
    parameters = inspect.signature(target, follow_wrapped=False).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def quoted(text: str) -> str:
    """Return a string literal, in double quotes unless that needs an escape."""
    plain = repr(text)
    return f'"{plain[1:-1]}"' if plain[0] == "'" and '"' not in text else plain


def path_text(path: str) -> Doc:
    """Return the expression for a path in a stage: ``h.1.attn`` -> ``self.h[1].attn``."""
    text = "self"
    for name in path.split("."):
        if name.isdigit() and str(int(name)) == name:
            text += f"[{name}]"
        elif name.isidentifier() and not keyword.iskeyword(name) and name not in _IN_STAGE:
            text += f".{name}"
        else:
            text += f"[{quoted(name)}]"
    return (text,)
