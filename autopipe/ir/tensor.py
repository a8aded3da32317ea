"""``TensorSpec``: what is known of a tensor before it exists; shapes may hold expressions of the batch."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "complex64": 8, "complex128": 16, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@functools.lru_cache(maxsize=4096)
def _parse(expression: str) -> ast.expr:
    try:
        return ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no shape expression") from error


def evaluate(dimension: int | str, sizes: Mapping[str, int]) -> int:
    """Return a dimension as a number: an int as it is, an expression such as ``s0*16`` with ``sizes`` put in.

    Raises: ValueError for an unknown symbol or anything that is not integer arithmetic.
    """
    if isinstance(dimension, int):
        return dimension

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name) if name in sizes:
                return sizes[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ValueError(f"cannot evaluate {dimension!r} with {dict(sizes)}")

    return value(_parse(dimension))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and whether a gradient flows.

    ``shape``: ints and strings; a string is integer arithmetic over symbols, ``s0`` being the first one (the batch).
    ``dtype``: torch's name without ``torch.``.
    """

    shape: tuple[int | str, ...]
    dtype: str
    requires_grad: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}")

    def concrete(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape as numbers."""
        return tuple(evaluate(dimension, sizes) for dimension in self.shape)

    def num_bytes(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes of the dense tensor."""
        count = DTYPE_BYTES[self.dtype]
        for dimension in self.concrete(sizes):
            count *= dimension
        return count

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(dimension) for dimension in self.shape)}]"
