"""Format seconds and bytes with a suitable unit, the same in tables, sentences and errors."""

from __future__ import annotations

_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def in_bytes(count: float) -> str:
    """Return ``1.50 GiB``, ``12.0 MiB``, ``34 B``."""
    for size, unit in _BYTES:
        if abs(count) >= size:
            return f"{_three(count / size)} {unit}"
    return f"{count:.0f} B"


def in_seconds(seconds: float) -> str:
    """Return ``1.25 s``, ``3.40 ms``, ``12.0 us``."""
    for size, unit in _SECONDS:
        if abs(seconds) >= size:
            return f"{_three(seconds / size)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e9:.0f} ns"


def _three(value: float) -> str:
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"
