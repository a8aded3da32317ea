"""Record which user functions run in a call, and with which arguments."""

from __future__ import annotations

import sys
import sysconfig
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from autopipe.trace.explain import is_users

_MOST_FRAMES = 32  # calls of one function whose arguments are kept
_LIBRARY = tuple(str(Path(sysconfig.get_paths()[name])) for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(str(Path(sysconfig.get_paths()[name])) for name in ("purelib", "platlib"))


@dataclass
class Ran:
    """One function that ran."""

    code: types.CodeType
    globals: dict[str, Any]
    names: dict[str, list[Any]] = field(default_factory=dict)  # argument -> its values, without tensors
    frames: int = 0  # calls so far
    classes: list[type] = field(default_factory=list)  # classes of ``self``, and values of ``cls``

    def keep(self, local: dict[str, Any]) -> bool:
        """Keep the arguments of one call. Return whether the class of ``self``, or ``cls``, is new."""
        self.frames += 1
        code = self.code
        count = code.co_argcount + code.co_kwonlyargcount
        for name in (*code.co_varnames[:count], *code.co_freevars):
            value = local.get(name)
            if value is not None and not isinstance(value, (Tensor, str, int, float)):
                known = self.names.setdefault(name, [])
                if not any(value is other for other in known):
                    known.append(value)
        instance, kind = local.get("self"), local.get("cls")
        if instance is not None:
            kind = type(instance)
        if not isinstance(kind, type) or kind in self.classes:
            return False
        self.classes.append(kind)
        return True


def observed(
    call: Callable[[], Any], into: dict[types.CodeType, Ran], first: Callable[[Ran], None] = lambda ran: None
) -> Any:
    """Call a function and record every user function that runs in it.

    ``first``: called with each of those functions just before its first run, and before its first run with an object of
    another class.
    """
    files: dict[str, bool] = {}

    def profile(frame: types.FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        ran = into.get(code)
        if ran is None:
            name = code.co_filename
            if name not in files:
                files[name] = is_users_file(name)
            if not files[name]:
                return
            ran = into[code] = Ran(code, frame.f_globals)
            ran.keep(frame.f_locals)
            first(ran)
        elif ran.frames < _MOST_FRAMES and ran.keep(frame.f_locals):
            first(ran)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        return call()
    finally:
        sys.setprofile(before)


def is_users_file(filename: str) -> bool:
    """Return whether a file belongs to the user or a model library: not to torch, autopipe or the standard library."""
    if filename.startswith("<") or not is_users(filename):
        return False
    return is_package(filename) or not filename.startswith(_LIBRARY)


def is_package(filename: str) -> bool:
    """Return whether a file belongs to an installed package."""
    return filename.startswith(_PACKAGES)


def is_own_file(filename: str | None) -> bool:
    """Return whether the user wrote a file, rather than a library."""
    return filename is not None and is_users_file(filename) and not is_package(filename)
