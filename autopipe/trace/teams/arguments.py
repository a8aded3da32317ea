"""Arguments of a member's calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from autopipe.ir.teams.axes import Place
from autopipe.team import Along

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def replaced(value: Any, path: Sequence[int | str], change: Callable[[Any], Any]) -> Any:
    """Return an argument whose element at ``path`` is changed."""
    if not path:
        return change(value)
    at = int(path[0])
    if isinstance(value, slice):
        bounds = [value.start, value.stop, value.step]
        bounds[at] = replaced(bounds[at], path[1:], change)
        return slice(*bounds)
    items = list(value)
    items[at] = replaced(items[at], path[1:], change)
    return tuple(items) if isinstance(value, tuple) else items


def rewritten(arguments: Arguments, path: Sequence[int | str], change: Callable[[Any], Any]) -> Arguments:
    """Return the arguments of a call whose element at ``path`` (``Rewrite.path``) is changed."""
    args, kwargs = arguments
    first, *rest = path
    if isinstance(first, int):
        return replaced(args, [first, *rest], change), kwargs
    return args, {**kwargs, first: replaced(kwargs[first], rest, change)}


def dropout_rate(node: fx.Node, module: nn.Module, arguments: Arguments) -> Any:
    """Return the rate of a dropout, a module or a function. ``module``: that has the graph of the node."""
    args, kwargs = arguments
    if node.op == "call_module":
        return module.get_submodule(str(node.target)).p
    return args[1] if len(args) > 1 else kwargs.get("p", 0.5)


def floor_divided(dimension: int | str, size: int) -> int | str:
    """Return a dimension of a shape divided by the size of a team. Raises: ValueError if it does not divide."""
    if isinstance(dimension, str):
        return f"({dimension})//{size}"
    if dimension % size:
        raise ValueError(f"a dimension of {dimension} cannot be divided by {size}")
    return dimension // size


def along(place: Place, size: int) -> Along:
    """Return where a value carries an axis, as an argument of ``autopipe.team``."""
    return place.dimension, size, tuple((segment.length, segment.inner) for segment in place.segments)
