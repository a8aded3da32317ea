"""Exceptions that the user's code raised outside of the calls that expect them, such as in a hook on a parameter."""

from __future__ import annotations

import traceback
from pathlib import Path

from autopipe.errors import AutopipeError, ModelFileError, RunError
from autopipe.users_code import AUTOPIPE, is_own_file_here, library_of


def error_of_users_code(error: BaseException, *own: Path) -> AutopipeError | None:
    """Return the error for an exception that the user's code raised; None if it comes from autopipe.

    An exception in a library that autopipe called comes from autopipe. The functions that load or run a model report
    errors of the user's code themselves. ``own``: further folders of autopipe's code.
    """
    out_of_memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
    if out_of_memory or type(error).__name__ == "OutOfMemoryError":
        return RunError(f"out of memory: {error}".rstrip(": "), remedy="use a smaller batch or model, or more ranks")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if library_of(frame.filename) == AUTOPIPE or any(path.resolve().is_relative_to(folder) for folder in own):
            return None  # a library that autopipe called
        if is_own_file_here(frame.filename):
            return ModelFileError(
                f"your code raised {type(error).__name__}: {error}",
                where=f"{path}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}",
                remedy="correct that line; --debug shows how it was reached",
            )
    return None
