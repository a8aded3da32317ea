"""Stacks that hanging ranks wrote into their logs (faulthandler's text): what is new in them, and the line that counts.

::

    Thread 0x00007f3c (most recent call first):
      File "/home/me/model.py", line 12 in forward
      File ".../torch/nn/modules/module.py", line 1790 in _call_impl
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

_FRAME = re.compile(r'^  File "(?P<path>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$')
_THREAD = re.compile(r"^(?P<current>Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_SHOWN = 6
_OURS = Path(__file__).parents[2]
_LARGEST_BYTES = 2**20


def sizes(logs: Sequence[Path]) -> list[int]:
    """Return how long each log is now, 0 where there is none."""
    return [log.stat().st_size if log.is_file() else 0 for log in logs]


def since(logs: Sequence[Path], mark: Sequence[int]) -> dict[int, str]:
    """Return what was written to the logs since their sizes were taken, by rank; nothing for the others."""
    found = {}
    for rank, (log, start) in enumerate(zip(logs, mark, strict=True)):
        if log.is_file() and log.stat().st_size > start:
            with log.open("rb") as file:
                file.seek(start)
                found[rank] = file.read(_LARGEST_BYTES).decode("utf-8", "replace")
    return found


def main_thread(text: str) -> list[tuple[str, int, str]]:
    """Return (path, line, function) of the main thread, innermost first.

    faulthandler writes threads newest first, so the main thread is the last one.
    """
    threads: list[list[tuple[str, int, str]]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append((frame["path"], int(frame["line"]), frame["name"]))
    return threads[-1] if threads else []


def innermost(text: str) -> str:
    """Return the innermost line of the main thread that is neither of an installed package nor ours, "" without one."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    for path, line, name in main_thread(text):
        if not path.startswith((*installed, str(_OURS), "<")):
            return f"{path}:{line} in {name}"
    return ""


def told(written: Mapping[int, str]) -> str:
    """Return the innermost frames of every rank for the message, "" where no rank wrote any."""
    lines = []
    for rank in sorted(written):
        frames = main_thread(written[rank])[:_SHOWN]
        lines += [f"  rank {rank}:", *(f"    {path}:{line} in {name}" for path, line, name in frames)] if frames else []
    return "\n" + "\n".join(lines) if lines else ""
