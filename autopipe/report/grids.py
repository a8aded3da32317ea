"""The grid of a schedule for a terminal: coloured, and in parts that fit its width."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from rich.text import Text

_CELL = re.compile(r"(?P<stage>\d*)(?P<op>[FBIW])(?:\d+:)?(?P<microbatch>\d+)(?:@\d+)?\+?")
# by operation, the colours of even and odd microbatches; a terminal without bright colours shows the same hue
_STYLES = {
    "F": ("blue", "bright_blue"),
    "B": ("green", "bright_green"),
    "I": ("cyan", "bright_cyan"),
    "W": ("yellow", "bright_yellow"),
}


def for_terminal(grid: str, width: int) -> tuple[Text, ...]:
    """Return the parts of a grid in ``width`` columns, one below the other, with a legend.

    A grid that fits is one part. A later part begins with the column at which it continues.
    """
    lines = grid.rstrip("\n").split("\n")
    labels, rows = zip(*(line.split("|", 1) if "|" in line else (line, "") for line in lines), strict=True)
    starts = {match.start() for row in rows for match in re.finditer(r"\S+", row)}
    cell = min((b - a for a, b in itertools.pairwise(sorted(starts))), default=1)
    room = max((width - len(labels[0]) - 2) // cell, 1) * cell
    length = max(map(len, rows), default=0) - 1
    parts = []
    for begin in range(0, max(length, 1), room):
        text = Text(no_wrap=True, overflow="crop")
        if begin:
            text.append(f"from column {begin // cell + 1}:\n", "dim")
        pieces = (row[1 + begin : 1 + begin + room].rstrip() for row in rows)
        for index, (label, piece) in enumerate(zip(labels, pieces, strict=True)):
            text.append("\n" if index else "")
            text.append(f"{label}| ")
            for words, style in _styled(piece):
                text.append(words, style)
        parts.append(text)
    return (*parts, _legend(grid))


def _styled(row: str) -> Iterator[tuple[str, str]]:
    """Yield the pieces of a row with their styles."""
    end = 0
    for match in _CELL.finditer(row):
        yield row[end : match.start()], ""
        style = _STYLES[match["op"]][int(match["microbatch"]) % 2]
        yield match[0].removesuffix("+"), style
        if match[0].endswith("+"):
            yield "+", "bold"
        end = match.end()
    yield row[end:], ""


def _legend(grid: str) -> Text:
    """Return what the letters of a grid mean."""
    names = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
    ops = {match["op"] for match in _CELL.finditer(grid)}
    text = Text("  ")
    for op, name in names.items():
        if op in ops:
            text.append(op, _STYLES[op][1]).append(f" {name}  ")
    if "+" in grid:
        text.append("+", "bold").append(" then the step")
    return text
