"""Expressions as nested pieces -> lines of at most 120 characters, wrapped at their brackets as formatters do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 120


@dataclass(frozen=True, slots=True)
class Group:
    """Items between brackets. ``comma``: whether a wrapped group ends with one (not in a subscript)."""

    opening: str
    items: tuple[Doc, ...]
    closing: str
    comma: bool = True


Piece = str | Group
Doc = tuple[Piece, ...]


def flat(doc: Sequence[Piece]) -> str:
    """Return the text on one line."""
    parts = []
    for piece in doc:
        if isinstance(piece, str):
            parts.append(piece)
        else:
            parts.append(piece.opening + ", ".join(flat(item) for item in piece.items) + piece.closing)
    return "".join(parts)


def wrapped(doc: Doc, indent: int) -> list[str]:
    """Return the lines of a statement. The widest bracket is opened first, then what is still too long inside it."""
    text = " " * indent + flat(doc)
    groups = [index for index, piece in enumerate(doc) if isinstance(piece, Group) and piece.items]
    if len(text) <= WIDTH or not groups:
        return [text]
    widest = max(groups, key=lambda index: (len(flat(doc[index : index + 1])), index))
    group = doc[widest]
    assert isinstance(group, Group)
    lines = [" " * indent + flat(doc[:widest]) + group.opening]
    inner = " " * (indent + 4) + ", ".join(flat(item) for item in group.items)
    numbers = len(group.items) > 8 and all(len(flat(item)) < 8 for item in group.items)
    if len(inner) <= WIDTH and (not group.comma or len(group.items) == 1):
        lines.append(inner)
    elif numbers:
        lines += _filled([flat(item) for item in group.items], indent + 4)
    else:
        for index, item in enumerate(group.items):
            found = wrapped(item, indent + 4)
            last = index + 1 == len(group.items)
            lines += [*found[:-1], found[-1] + ("," if group.comma or not last else "")]
    lines.append(" " * indent + group.closing + flat(doc[widest + 1 :]))
    return lines


def _filled(texts: Sequence[str], indent: int) -> list[str]:
    lines, current = [], " " * indent
    for text in texts:
        if len(current) + len(text) + 2 > WIDTH:
            lines.append(current.rstrip())
            current = " " * indent
        current += f"{text}, "
    return [*lines, current.rstrip()]
