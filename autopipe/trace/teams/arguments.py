"""Arguments of a member's calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopipe.ir.teams.axes import Place
from autopipe.team import Along


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
