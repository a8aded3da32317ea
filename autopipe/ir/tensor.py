"""``TensorSpec``: shape and dtype of a tensor. A dimension may be an expression of the batch's sizes."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autopipe.ir.artifact import OMIT_DEFAULT

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "complex64": 8, "complex128": 16, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip

# the limit of a size, more than any memory; computing a power far above it could take forever
_LARGEST = 2**63
_LARGEST_EXPONENT = 16
_LONGEST = 1000  # characters of an expression


def _is_possible(node: ast.BinOp) -> bool:
    """Return whether an operation has a result for all sizes, which are at least 1."""
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
    """Return the symbols in a dimension.

    Raises: ValueError if it is not an expression of integer arithmetic.
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
    """Return the value of a dimension: an int as it is, an expression such as ``s0*16`` with the values in ``sizes``.

    Raises: ValueError for an unknown symbol, a division by zero, or an expression that is not integer arithmetic.
    """
    if isinstance(dimension, int):
        return dimension

    def value(node: ast.expr) -> int:
        number = computed(node)
        if not -_LARGEST < number < _LARGEST:
            raise ValueError(f"{dimension!r} does not fit in 64 bits with {dict(sizes)}")
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
    """Shape, dtype and memory order of a tensor, and whether it needs a gradient.

    Raises: ValueError for an unknown dtype, an invalid dimension, or an order that is not one of the dimensions.
    """

    # a string is an expression of integer arithmetic over symbols; ``s0`` is the first symbol (the batch size)
    shape: tuple[int | str, ...]
    dtype: str  # torch's name without ``torch.``
    requires_grad: bool = False
    # the dimensions from the outermost in memory to the innermost, then 1 for each that has gaps after its elements,
    # else 0; () for a contiguous tensor
    order: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT)
    # the dtype on the CPU, where models are captured, if it is another one than on the device that computes; else ""
    captured_dtype: str = field(default="", metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        for dimension in self.shape:
            symbols_of(dimension)
            if isinstance(dimension, int) and dimension < 0:
                raise ValueError(f"a dimension must be at least 0, and is {dimension}")
        count = len(self.shape)
        if self.order and (sorted(self.order[:count]) != [*range(count)] or len(self.order) != 2 * count):
            raise ValueError(f"{list(self.order)} is not a memory order of {count} dimensions")

    @property
    def as_captured(self) -> TensorSpec:
        """The same tensor on the CPU, which does not depend on the device that computes."""
        if not self.order and not self.captured_dtype:
            return self
        return TensorSpec(self.shape, self.captured_dtype or self.dtype, self.requires_grad)

    def concrete(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape with the values in ``sizes``. Raises: ValueError as ``evaluate``."""
        return tuple(evaluate(dimension, sizes) for dimension in self.shape)

    def num_bytes(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes of the dense tensor. Raises: ValueError as ``evaluate``."""
        count = DTYPE_BYTES[self.dtype]
        for dimension in self.concrete(sizes):
            count *= dimension
        return count

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(dimension) for dimension in self.shape)}]"
