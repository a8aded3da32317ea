"""The location of an error in a rank: the line of the stage file, and the line of the user's code it came from."""

from __future__ import annotations

import traceback

from autopipe.generate.origin import users_place
from autopipe.ir.graph import Graph
from autopipe.users_code import is_own_file_here


def error_location(error: BaseException, graph: Graph | None) -> str:
    """Return ``file:line: text`` of the last line outside of installed packages, and the user's line if it differs.

    ``graph``, of the run, maps the lines of stage files to those of the user.
    """
    line = _line(error)
    origin = users_place(error, graph) if graph is not None else ""
    return ", which is ".join(part for part in (line, origin) if part)


def _line(error: BaseException) -> str:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_own_file_here(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {(frame.line or '').strip()}"
    return ""
