"""``RefusedError``: what a script does that cannot run in stages with the same numbers, and where it does it."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from autopipe.errors import RunError

_PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"
_TORCH = tuple({f"{path.parent}/" for path in (Path(torch.__file__), Path(torch.__file__).resolve())})  # may be a link
_LIBRARIES = tuple({sysconfig.get_paths()[key].rstrip("/") + "/" for key in ("purelib", "platlib", "stdlib")})


class RefusedError(RunError):
    """The script does something that stages cannot do with the same numbers. ``where`` is its ``file:line``."""


def refused(what: str, remedy: str = "") -> RefusedError:
    """Return the error for what the script does at this moment."""
    error = RefusedError(f"autopipe run: {what}", where=place(), remedy=remedy or "run it with python")
    raised.append(error)
    return error


raised: list[RefusedError] = []
"""All of them: a script that catches one and goes on has other results, and must not end as if it had not."""


def place() -> str:
    """Return ``file:line`` of the innermost call that is neither in autopipe nor in torch; "" without one."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_PACKAGE, *_TORCH, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return ""


def from_a_library() -> bool:
    """Return whether the innermost call outside of autopipe and torch is in an installed package."""
    return in_a_library(place())


def in_a_library(file: str) -> bool:
    """Return whether a file is of autopipe, torch, Python or an installed package, or not a file."""
    return not file or file.startswith((_PACKAGE, *_TORCH, *_LIBRARIES, "<"))


def in_autopipe(file: str) -> bool:
    """Return whether a file is of autopipe."""
    return file.startswith(_PACKAGE)


def is_of_a_library(kind: type) -> bool:
    """Return whether a class is of autopipe, torch, Python or an installed package."""
    return is_library(sys.modules.get(str(kind.__module__)))


def is_library(module: Any) -> bool:
    """Return the same for a module of Python. A script may register any object as one."""
    file = getattr(module, "__file__", None)
    return in_a_library(file if isinstance(file, str) else "")
