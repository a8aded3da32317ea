"""``RefusedError``: what a script does that cannot run in stages with the same numbers, and where it does it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

from autopipe.errors import RunError, TraceError
from autopipe.users_code import AUTOPIPE, TORCH, is_own_file, library_of


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
    return next((_line(f) for f in _frames(frame) if _is_outside(f.f_code.co_filename)), "")


def script_place() -> str:
    """Return ``file:line`` of the innermost call in a file of the script; of a library if no other one is left."""
    frame = sys._getframe(1)
    return next((_line(f) for f in _frames(frame) if is_own_file(f.f_code.co_filename)), "") or place()


def name_of_object(value: Any) -> str:
    """Return the variable, or attribute of one, by which the script has an object at this moment; "" without one."""
    for frame in _frames(sys._getframe(1)):
        if not is_own_file(frame.f_code.co_filename):
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


def _is_outside(file: str) -> bool:
    """Return whether a file is neither of autopipe nor of torch."""
    return not file.startswith("<") and library_of(file) not in (AUTOPIPE, TORCH)


def from_a_library() -> bool:
    """Return whether the innermost call outside of autopipe and torch is in Python or an installed package."""
    return not is_own_file(place().rpartition(":")[0])


class EffectError(TraceError):
    """The forward does what stages do not."""
