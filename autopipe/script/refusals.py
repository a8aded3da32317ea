"""``RefusedError``: what a script does that cannot run in stages with the same numbers, and where it does it."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

from autopipe.errors import RunError, TraceError

_PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"
_TORCH = tuple({f"{path.parent}/" for path in (Path(torch.__file__), Path(torch.__file__).resolve())})  # may be a link
_LIBRARIES = tuple({sysconfig.get_paths()[key].rstrip("/") + "/" for key in ("purelib", "platlib", "stdlib")})


class RefusedError(RunError):
    """The script does something that stages cannot do with the same numbers. ``where`` is its ``file:line``."""


def refused(what: str, remedy: str = "", where: str = "") -> RefusedError:
    """Return the error for what the script does at this moment. ``where``: if not here."""
    inner, line = place(), script_place()
    inside = f" (inside of {inner})" if line != inner else ""
    remedy = remedy or "run it with python"
    error = RefusedError(f"autopipe run: {what}", where=where or f"{line}{inside}", remedy=remedy)
    raised.append(error)
    return error


raised: list[RefusedError] = []
"""All of them: a script that catches one and goes on has other results, and must not end as if it had not."""


def place() -> str:
    """Return ``file:line`` of the innermost call that is neither in autopipe nor in torch; "" without one."""
    frame = sys._getframe(1)
    return next((_line(f) for f in _frames(frame) if not f.f_code.co_filename.startswith((_PACKAGE, *_TORCH, "<"))), "")


def script_place() -> str:
    """Return ``file:line`` of the innermost call in a file of the script; of a library if no other one is left."""
    frame = sys._getframe(1)
    return next((_line(f) for f in _frames(frame) if not in_a_library(f.f_code.co_filename)), "") or place()


def name_of_object(value: Any) -> str:
    """Return the variable, or attribute of one, by which the script has an object at this moment; "" without one."""
    for frame in _frames(sys._getframe(1)):
        if in_a_library(frame.f_code.co_filename):
            continue
        variables = {**frame.f_globals, **frame.f_locals}
        for name, other in variables.items():
            if other is value and not name.startswith("__"):
                return str(name)
        for name, other in variables.items():
            attributes = getattr(other, "__dict__", None)
            if isinstance(attributes, dict) and not isinstance(other, ModuleType):
                for key, attribute in attributes.items():
                    if attribute is value:
                        return f"{name}.{key}"
    return ""


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, and those that have called it.

    Those of the main thread follow: a hook of a backward on a GPU runs in a thread of torch, while the script waits.
    """
    while frame is not None:
        yield frame
        frame = frame.f_back
    if threading.current_thread() is not threading.main_thread():
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        while main is not None:
            yield main
            main = main.f_back


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def from_a_library() -> bool:
    """Return whether the innermost call outside of autopipe and torch is in an installed package."""
    return in_a_library(place())


def in_a_library(file: str) -> bool:
    """Return whether a file is of autopipe, torch, Python or an installed package, or not a file."""
    own = file and not file.startswith((_PACKAGE, *_TORCH, *_LIBRARIES, "<"))
    return not own or "/site-packages/" in file or "/dist-packages/" in file


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


class UnsettledError(Exception):
    """The forward sets attributes to constants. ``calls``: those that depend on more than constants."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__("the forward sets attributes to constants")
        self.calls = calls


class EffectError(TraceError):
    """The forward does more than compute."""


class DoneError(EffectError):
    """The forward has done something that cannot be undone, so the call cannot run in the script's process either."""
