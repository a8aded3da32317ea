"""``Call``: one call of the graph, as the rules read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, fx, nn

from autopipe.trace.axes.dimension_factors import Dimension, DimensionFactors, Dims, NoRuleError

Parts = tuple[Dims | None, ...]  # the result of a call that returns several; None for what is not a tensor
Path = tuple[int | str, ...]


@dataclass
class Roles:
    """What the calls do with leaves, collected while the graph is read."""

    sums: list[tuple[str, str, Dimension]] = field(default_factory=list)  # node, how, the leaves that it adds over
    literals: list[tuple[str, Path, int, Dimension]] = field(default_factory=list)  # node, path, value, what it counts
    biases: set[tuple[str, str]] = field(default_factory=set)  # node, the value or parameter that it adds after the sum
    draws: list[tuple[str, Dimension]] = field(default_factory=list)  # node, the leaves of what it draws for


def shape_of(value: Tensor) -> tuple[int, ...]:
    """Return the shape of a recorded value in the captured batch; no guard is added. Raises: NoRuleError."""
    shape: Iterable[Any] = value.shape
    sizes = [size if type(size) is int else size.node.hint for size in shape]
    if any(type(size) is not int for size in sizes):
        raise NoRuleError("its result has a size that depends on the data")
    return tuple(sizes)


class Call:
    """One call, with the dimensions of its operands."""

    def __init__(
        self,
        node: fx.Node,
        module: nn.Module | None,
        leaves: DimensionFactors,
        roles: Roles,
        dims_of: Callable[[Any], Any],
    ) -> None:
        self.node = node
        self.module = module  # that is called, or None
        self.leaves = leaves
        self._roles = roles
        self._dims_of = dims_of

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result. Raises: NoRuleError if it is not one tensor."""
        value = self.node.meta.get("val")
        if not isinstance(value, Tensor):
            raise NoRuleError("its result is not one tensor")
        return shape_of(value)

    def argument(self, index: int, keyword: str, default: Any = None) -> Any:
        """Return an argument as it was recorded."""
        if index < len(self.node.args):
            return self.node.args[index]
        return self.node.kwargs.get(keyword, default)

    def path(self, index: int, keyword: str) -> Path:
        """Return where an argument is."""
        return (index,) if index < len(self.node.args) else (keyword,)

    def number(self, index: int, keyword: str, default: Any = None) -> int:
        """Return a constant integer. Raises: NoRuleError."""
        value = self.argument(index, keyword, default)
        if type(value) is not int:
            raise NoRuleError(f"its argument {keyword} is not a constant")
        return value

    def dims_of(self, value: Any) -> Dims | None:
        """Return the dimensions of an operand: a node, a parameter or a buffer. None if it is not a tensor."""
        dims = self._dims_of(value)
        return dims if isinstance(dims, list) else None

    def parts_of(self, value: Any) -> Parts | None:
        """Return the dimensions of an operand that is a tuple of tensors, or None."""
        parts = self._dims_of(value)
        return parts if isinstance(parts, tuple) else None

    def operand(self, index: int, keyword: str = "input") -> Dims:
        """Return the dimensions of a tensor operand. Raises: NoRuleError."""
        dims = self.dims_of(self.argument(index, keyword))
        if dims is None:
            raise NoRuleError(f"its argument {keyword} is not one tensor of the graph")
        return dims

    def optional(self, index: int, keyword: str) -> Dims | None:
        """Return the dimensions of a tensor operand that may be None."""
        return None if self.argument(index, keyword) is None else self.operand(index, keyword)

    def state(self, name: str) -> Dims | None:
        """Return the dimensions of a parameter of the called module; None if it has none. Raises: NoRuleError."""
        tensor = getattr(self.module, name, None)
        if tensor is None:
            return None
        dims = self.dims_of(tensor)
        if dims is None:
            raise NoRuleError(f"its {name} is computed")
        return dims

    def sizes(self, index: int, keyword: str) -> list[tuple[Any, Path]]:
        """Return sizes, given as a sequence or one by one from argument ``index`` on, each with its path."""
        first = self.argument(index, keyword)
        if isinstance(first, (list, tuple)):
            start = self.path(index, keyword)
            return [(size, (*start, at)) for at, size in enumerate(first)]
        return [(size, (at,)) for at, size in enumerate(self.node.args[index:], start=index)]

    def dimension(self, index: int, keyword: str, dims: Sequence[Any], default: Any = None) -> int:
        """Return the index of a dimension, at least 0. Raises: NoRuleError."""
        number = self.number(index, keyword, default)
        if not -len(dims) <= number < len(dims):
            raise NoRuleError("it names a dimension that does not exist")
        return number % len(dims)

    def dimensions(self, index: int, keyword: str, dims: Sequence[Any]) -> list[int]:
        """Return the indices of one or several dimensions; all if they are not given. Raises: NoRuleError."""
        value = self.argument(index, keyword)
        if value is None:
            return [*range(len(dims))]
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if any(type(number) is not int or not -len(dims) <= number < len(dims) for number in numbers):
            raise NoRuleError(f"its argument {keyword} is not a constant")
        return [number % len(dims) for number in numbers]

    # --- what the rules find ------------------------------------------------------------------------------------------

    def whole(self, leaves: Iterable[int], why: str) -> None:
        """Forbid to shard these leaves."""
        self.leaves.mark_whole(leaves, why)

    def adds(self, leaves: Iterable[int], how: str) -> None:
        """Record that the call adds over these leaves; ``how``: one of ``ir.teams.axes.SUMS``."""
        self._roles.sums.append((self.node.name, how, list(leaves)))

    def counts(self, value: Any, path: Path, leaves: Iterable[int]) -> None:
        """Record that an argument, if it is not -1, is the number of elements of these leaves."""
        if isinstance(value, fx.Node):
            self._roles.literals.append((self.node.name, path, 0, list(leaves)))
        elif type(value) is int and value > 0:
            self._roles.literals.append((self.node.name, path, value, list(leaves)))

    def after_the_sum(self, operand: Any) -> None:
        """Record that an operand is added after the sum. ``operand``: as in the graph, or a name."""
        if isinstance(operand, fx.Node):
            operand = operand.target if operand.op == "get_attr" else operand.name
        self._roles.biases.add((self.node.name, str(operand)))

    def draws_for(self, dims: Dims) -> None:
        """Record for which dimensions the call draws random numbers, if it does."""
        self._roles.draws.append((self.node.name, [leaf for dimension in dims for leaf in dimension]))

    def broadcast(self, operands: Iterable[Dims | None]) -> Dims:
        """Unify operands as torch broadcasts them, and return the dimensions of the result."""
        present = [dims for dims in operands if dims is not None]
        rank = max((len(dims) for dims in present), default=0)
        result: Dims = [[] for _ in range(rank)]
        for dims in present:
            for at in range(1, len(dims) + 1):
                if not result[-at]:
                    result[-at] = list(dims[-at])
                elif dims[-at]:
                    self.leaves.unify(result[-at], dims[-at])
        return result


Rule = Callable[[Call], Dims | Parts]
FUNCTIONS: dict[str, Rule] = {}
"""Name of a function of torch or method of a tensor -> its rule."""
MODULES: dict[type, Rule] = {}
"""Type of a module of torch -> its rule. A subclass has none."""


_R = TypeVar("_R", bound=Rule)


def rule(*names: str | type) -> Callable[[_R], _R]:
    """Register the rule of functions, methods and modules."""

    def register(function: _R) -> _R:
        for name in names:
            if isinstance(name, str):
                FUNCTIONS[name] = function
            else:
                MODULES[name] = function
        return function

    return register
