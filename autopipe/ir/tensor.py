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

# the limit of a size: more than any memory holds; computing a power far above it would not end
_LARGEST = 2**63
_LARGEST_EXPONENT = 16
_LONGEST = 1000  # characters of an expression


def _is_possible(node: ast.BinOp) -> bool:
    """Whether an operation has a result whatever the sizes are, which are 1 at least."""
    match node.op, node.right:
        case ((ast.FloorDiv() | ast.Mod()), ast.Constant(value=int(number))):
            return number > 0
        case ast.Pow(), ast.Constant(value=int(number)):
            return 0 <= number <= _LARGEST_EXPONENT
        case ((ast.FloorDiv() | ast.Mod()), right):
            return not isinstance(right, ast.UnaryOp)
        case ast.Pow(), _:
            return False
    return True


def _power(base: int, exponent: int) -> int:
    if not 0 <= exponent <= _LARGEST_EXPONENT:
        raise ValueError(f"{exponent} is not a valid exponent of a shape")
    return int(base**exponent)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


@functools.lru_cache(maxsize=4096)
def _parse(expression: str) -> ast.expr:
    try:
        if len(expression) > _LONGEST:
            raise SyntaxError("too long")
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression[:60]!r} is not a shape expression") from error


@functools.lru_cache(maxsize=4096)
def symbols_of(dimension: int | str) -> frozenset[str]:
    """Return the symbols that a dimension is made of.

    Raises: ValueError for anything that is not integer arithmetic.
    """
    if isinstance(dimension, int):
        return frozenset()
    allowed = (ast.Constant, ast.Name, ast.BinOp, ast.UnaryOp, ast.USub, ast.Load, *_OPERATORS)
    body = _parse(dimension)
    for node in ast.walk(body):
        number = isinstance(node, ast.Constant) and (type(node.value) is not int or node.value >= _LARGEST)
        if not isinstance(node, allowed) or number or (isinstance(node, ast.BinOp) and not _is_possible(node)):
            raise ValueError(f"{dimension[:60]!r} is not a shape expression")
    return frozenset(node.id for node in ast.walk(body) if isinstance(node, ast.Name))


def evaluate(dimension: int | str, sizes: Mapping[str, int]) -> int:
    """Return a dimension as a number: an int as it is, an expression such as ``s0*16`` with ``sizes`` put in.

    Raises: ValueError for an unknown symbol, a division by zero, or anything that is not integer arithmetic.
    """
    if isinstance(dimension, int):
        return dimension

    def value(node: ast.expr) -> int:
        number = computed(node)
        if not -_LARGEST < number < _LARGEST:
            raise ValueError(f"{dimension!r} is beyond any size with {dict(sizes)}")
        return number

    def computed(node: ast.expr) -> int:
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

    try:
        return value(_parse(dimension))
    except ZeroDivisionError:
        raise ValueError(f"{dimension!r} divides by zero with {dict(sizes)}") from None
    except RecursionError:
        raise ValueError(f"{dimension[:60]!r} is not a shape expression") from None


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
        for dimension in self.shape:
            symbols_of(dimension)
            if isinstance(dimension, int) and dimension < 0:
                raise ValueError(f"a dimension must be at least 0, and is {dimension}")

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
