"""The user's line of a recorded call, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopipe.trace.explain import Line, place_in, short_path, short_place_in


def source_text(meta: Mapping[str, Any]) -> str:
    """Return ``file:line`` of a node, or "" if unknown."""
    if "source" not in meta:
        return ""
    filename, line = meta["source"]
    return f"{short_path(filename)}:{line}"


def own_text(meta: Mapping[str, Any]) -> str:
    """Return ``file:line`` of the model's line that leads to a library call, or "" if the model makes the call."""
    if "own" not in meta:
        return ""
    filename, line = meta["own"]
    return f"{short_path(filename)}:{line}"


def where_text(meta: Mapping[str, Any]) -> str:
    """Return ``file:line: source line`` of a node, the model's own line before that of a library, or ""."""
    return place_in(*_own_and_inner(meta)) if "source" in meta else ""


def short_where_text(meta: Mapping[str, Any]) -> str:
    """Return ``file:line`` of a node, the model's own line before that of a library, or ""."""
    return short_place_in(*_own_and_inner(meta)) if "source" in meta else ""


def _own_and_inner(meta: Mapping[str, Any]) -> tuple[Line, Line | None]:
    source: Line = meta["source"]
    return (meta["own"], source) if "own" in meta else (source, None)
