"""The title of a forked process, as ps shows it: without one, that is the command of the process it was forked from."""

from __future__ import annotations

import ctypes
from pathlib import Path

# the fields of /proc/PID/stat, counted from the third: where the arguments of the process begin and end
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46


def find_arguments() -> tuple[int, int] | None:
    """Return where the arguments of this process begin and end in its memory, or None if that is unknown."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
    except (OSError, IndexError, ValueError):
        return None
    return (begin, end) if 0 < begin < end else None


def set_title(title: str, arguments: tuple[int, int]) -> None:
    """Replace the arguments that ps shows: those of the model may be secret, and forked processes inherit them."""
    begin, end = arguments
    size = end - begin
    ctypes.memmove(begin, title.encode()[: size - 1].ljust(size, b"\0"), size)
