"""Python values and calls to source text, in the form in which a person would write them."""

from __future__ import annotations

import enum
import keyword
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopipe.errors import TraceError

INFIX = {
    "operator.add": "+", "operator.sub": "-", "operator.mul": "*", "operator.truediv": "/", "operator.floordiv": "//",
    "operator.mod": "%", "operator.pow": "**", "operator.matmul": "@", "operator.eq": "==", "operator.ne": "!=",
    "operator.lt": "<", "operator.le": "<=", "operator.gt": ">", "operator.ge": ">=", "operator.and_": "&",
    "operator.or_": "|", "operator.xor": "^", "operator.lshift": "<<", "operator.rshift": ">>",
}  # fmt: skip
PREFIX = {"operator.neg": "-", "operator.invert": "~"}
DEVICE = "device_of(self)"


def attribute(path: str, root: str = "self") -> str:
    """Return the expression for a dotted path: ``h.1.attn`` is ``self.h[1].attn``."""
    text = root
    for part in path.split("."):
        if part.isidentifier() and not keyword.iskeyword(part):
            text += f".{part}"
        else:
            text += f"[{part}]" if part.isdecimal() and str(int(part)) == part else f"[{part!r}]"
    return text


class Values:
    """Writes values. ``name``: node -> its variable; ``module``: a module's name -> what the file calls it."""

    def __init__(self, name: Callable[[fx.Node], str], module: Callable[[str], str]) -> None:
        self._name, self._module = name, module

    def __call__(self, value: Any) -> str:
        """Return the text of a value. Raises: TraceError where it has none."""
        if isinstance(value, fx.Node):
            return self._name(value)
        if isinstance(value, enum.Enum):
            return f"{self.dotted(type(value))}.{value.name}"
        if value is None or value is Ellipsis or isinstance(value, (bool, int, str, bytes)):
            return "..." if value is Ellipsis else repr(value)
        if isinstance(value, (float, complex)):
            return self._number(value)
        if isinstance(value, (tuple, list, dict, slice, range)):
            return self._collection(value)
        if isinstance(value, torch.device):
            return DEVICE
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            return str(value)
        if isinstance(value, type) or callable(value):
            return self.dotted(value)
        raise TraceError(
            f"an argument of type {type(value).__name__} cannot be written as source text: {value!r:.80}",
            remedy="pass a number, a string, a tensor, or a collection of them",
        )

    @staticmethod
    def _number(value: float | complex) -> str:
        if isinstance(value, complex) or math.isfinite(value):
            return repr(value)
        return f'float("{value}")'

    def _collection(self, value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self(key)}: {self(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self(value.start)}, {self(value.stop)}, {self(value.step)})"
        if isinstance(value, range):
            return repr(value)
        items = [self(item) for item in value]
        if isinstance(value, list):
            return "[" + ", ".join(items) + "]"
        plain = "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"
        if type(value) in (tuple, torch.Size):
            return plain
        return f"{self.dotted(type(value))}({', '.join(items)})"  # a named tuple

    def dotted(self, target: Any) -> str:
        """Return the dotted name of a class or function, its module imported under the name the file has for it."""
        module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
        if not module or not name or "<" in name:
            raise TraceError(
                f"{target!r:.80} has no name that a stage file could import",
                remedy="define it at the top of a module",
            )
        return name if module == "builtins" else f"{self._module(module)}.{name}"

    def index(self, key: Any) -> str:
        """Return what stands between the brackets."""
        return ", ".join(map(self._subscript, key)) if isinstance(key, tuple) and key else self._subscript(key)

    def _subscript(self, key: Any) -> str:
        if not isinstance(key, slice):
            return self(key)
        ends = [key.start, key.stop] if key.step is None else [key.start, key.stop, key.step]
        return ":".join("" if end is None else self(end) for end in ends)

    def operand(self, value: Any) -> str:
        """Return an operand of an infix operator: a negative number in brackets."""
        text = self(value)
        return f"({text})" if text.startswith("-") else text


def wrapped(indent: int, head: str, arguments: Sequence[str], tail: str = ")", width: int = 120) -> list[str]:
    """Return ``head + arguments + tail`` as lines of at most ``width``: one argument a line where one is too short."""
    space = " " * indent
    line = space + head + ", ".join(arguments) + tail
    if len(line) <= width or not arguments:
        return [line]
    inner = space + "    " + ", ".join(arguments) + ","
    if len(inner) <= width and len(space + head) <= width:
        return [space + head, inner, space + tail]
    return [space + head, *(f"{space}    {argument}," for argument in arguments), space + tail]
