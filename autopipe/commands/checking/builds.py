"""Whether two builds of a model have equal attributes: a class may count its objects."""

from __future__ import annotations

from typing import Any

from autopipe.workload import Workload

_NUMBERS = (bool, int, float, complex, tuple)  # a name or an identifier is rarely the cause


def differing_attribute(workload: Workload) -> str:
    """Build the model twice, and return the first attribute that differs with its two values, or ""."""
    one, other = workload.build_model(), workload.build_model()
    parts = dict(other.named_modules())
    for path, part in one.named_modules():
        for name, value in vars(part).items():
            second: Any = vars(parts[path]).get(name) if path in parts else None
            if isinstance(value, _NUMBERS) and type(value) is type(second) and repr(value) != repr(second):
                return f"{path}.{name} is {value!r} in one build and {second!r} in the next".lstrip(".")
    return ""


__all__ = ["differing_attribute"]
