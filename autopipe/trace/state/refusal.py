"""The errors for state that is changed and read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from autopipe.errors import TraceError
from autopipe.trace.state.reading.source import Access

FORWARD, DATA = "the forward or the loss", "the data hook"
KEEP = "make it a buffer (register_buffer) that torch operations update, or a tensor of the batch"
INPUT = "pass it as a tensor of the batch"
DRAW = "draw with torch's functions, without generator=, and apply the result as a factor"
FREEZE = "freeze and switch parts where the model is built; another set of trained parameters is another run"


def refuse(who: str, name: str, writes: Sequence[Access], reads: Sequence[Access], remedy: str) -> NoReturn:
    """Raise the TraceError for state that ``who`` changes, with the first line that writes it or reads it."""
    where = next((access.where for access in (*writes, *reads)), "")
    read = f"it is read at {_short(reads[0].where)}; " if writes and reads else ""
    also = ", and the model reads it" if reads else ""
    raise TraceError(
        f"{who} changes {name}{also}: the model is not one fixed graph", where=where, remedy=f"{read}{remedy}"
    )


def _short(where: str) -> str:
    path, colon, rest = where.partition(":")
    return f"{Path(path).name}{colon}{rest}"


__all__ = ["DATA", "DRAW", "FORWARD", "FREEZE", "INPUT", "KEEP", "refuse"]
