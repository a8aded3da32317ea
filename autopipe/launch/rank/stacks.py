"""The stacks that hanging ranks wrote to their logs, in faulthandler's format.

::

    Thread 0x00007f3c (most recent call first):
      File "/home/me/model.py", line 12 in forward
      File ".../torch/nn/modules/module.py", line 1790 in _call_impl
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from autopipe.users_code import is_own_file

_FRAME = re.compile(r'^  File "(?P<path>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$')
_THREAD = re.compile(r"^(?P<current>Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_SHOWN = 6
_LARGEST_BYTES = 2**20


def sizes(logs: Sequence[Path]) -> list[int]:
    """Return the size of each log, 0 if it does not exist."""
    return [log.stat().st_size if log.is_file() else 0 for log in logs]


def since(logs: Sequence[Path], mark: Sequence[int]) -> dict[int, str]:
    """Return the text that each log has gained since its size in ``mark``, by rank, for the logs that grew."""
    written = {}
    for rank, (log, start) in enumerate(zip(logs, mark, strict=True)):
        if log.is_file() and log.stat().st_size > start:
            with log.open("rb") as file:
                file.seek(start)
                written[rank] = file.read(_LARGEST_BYTES).decode("utf-8", "replace")
    return written


def main_thread(text: str) -> list[tuple[str, int, str]]:
    """Return (path, line, function) of the main thread, innermost first.

    faulthandler writes the newest thread first, so the main thread is the last.
    """
    threads: list[list[tuple[str, int, str]]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append((frame["path"], int(frame["line"]), frame["name"]))
    return threads[-1] if threads else []


def innermost(text: str) -> str:
    """Return the innermost line of the user's code in the main thread, "" if it has none."""
    for path, line, name in main_thread(text):
        if is_own_file(path):
            return f"{path}:{line} in {name}"
    return ""


def format_stacks(written: Mapping[int, str]) -> str:
    """Return the innermost frames of every rank for a message, "" if no rank wrote any."""
    lines = []
    for rank in sorted(written):
        frames = main_thread(written[rank])[:_SHOWN]
        lines += [f"  rank {rank}:", *(f"    {path}:{line} in {name}" for path, line, name in frames)] if frames else []
    return "\n" + "\n".join(lines) if lines else ""
