"""Format nested expressions as lines of at most 120 characters, wrapped at their brackets as formatters do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 120


@dataclass(frozen=True, slots=True)
class Group:
    """Items between brackets."""

    opening: str
    items: tuple[Doc, ...]
    closing: str
    comma: bool = True  # whether a wrapped group ends with a comma (not in a subscript)


Piece = str | Group
Doc = tuple[Piece, ...]


def flat(doc: Sequence[Piece]) -> str:
    """Return the source on one line."""
    parts = []
    for piece in doc:
        if isinstance(piece, str):
            parts.append(piece)
        else:
            parts.append(piece.opening + ", ".join(flat(item) for item in piece.items) + piece.closing)
    return "".join(parts)


def wrapped(doc: Doc, indent: int) -> list[str]:
    """Return the lines of a statement.

    A chain of calls that fits on a separate line is put in parentheses. Otherwise the widest bracket is broken, and
    items in it that are still too long are wrapped in turn.
    """
    space = " " * indent
    groups = [index for index, piece in enumerate(doc) if isinstance(piece, Group) and piece.items]
    if len(space + flat(doc)) <= WIDTH or not groups:
        return [space + flat(doc)]
    head = doc[0]
    if (
        isinstance(head, str)
        and head.endswith(" = ")
        and len(groups) > 1
        and len(space + "    " + flat(doc[1:])) <= WIDTH
    ):
        return [f"{space}{head}(", f"{space}    {flat(doc[1:])}", f"{space})"]
    widest = max(groups, key=lambda index: (len(flat(doc[index : index + 1])), index))
    group = doc[widest]
    assert isinstance(group, Group)
    texts = [flat(item) for item in group.items]
    opening, closing = flat(doc[:widest]) + group.opening, group.closing + flat(doc[widest + 1 :])
    if len(space + "    " + ", ".join(texts)) <= WIDTH:
        inner = [f"{space}    {', '.join(texts)}"]
    elif len(texts) > 8 and max(map(len, texts)) < 8:
        inner = _filled(texts, indent + 4)
    else:
        inner = []
        for index, item in enumerate(group.items):
            lines = wrapped(item, indent + 4)
            last = index + 1 == len(texts)
            inner += [*lines[:-1], lines[-1] + ("," if group.comma or not last else "")]
    return [space + opening, *inner, space + closing]


def _filled(texts: Sequence[str], indent: int) -> list[str]:
    lines, current = [], " " * indent
    for text in texts:
        if len(current) + len(text) + 2 > WIDTH:
            lines.append(current.rstrip())
            current = " " * indent
        current += f"{text}, "
    return [*lines, current.rstrip()]


def harmless(text: str) -> str:
    """Return a text that is safe in a comment or a docstring, because it may contain any file name."""
    return "".join(sign if sign.isprintable() and sign not in '"\\' else "?" for sign in text)
