"""Which functions of the user's run in a call, and with what arguments."""

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

_MOST_FRAMES = 32  # of one function, whose arguments are kept
_LIBRARY = tuple(str(Path(sysconfig.get_paths()[name])) for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(str(Path(sysconfig.get_paths()[name])) for name in ("purelib", "platlib"))


@dataclass
class Ran:
    """One function that ran. ``names``: the objects that its arguments were, tensors left out."""

    code: types.CodeType
    globals: dict[str, Any]
    names: dict[str, list[Any]] = field(default_factory=dict)
    frames: int = 0

    def keep(self, local: dict[str, Any]) -> None:
        """Keep the arguments of one call."""
        self.frames += 1
        code = self.code
        count = code.co_argcount + code.co_kwonlyargcount
        for name in (*code.co_varnames[:count], *code.co_freevars):
            value = local.get(name)
            if value is not None and not isinstance(value, (Tensor, str, int, float)):
                known = self.names.setdefault(name, [])
                if not any(value is other for other in known):
                    known.append(value)


def observed(call: Callable[[], Any], into: dict[types.CodeType, Ran]) -> Any:
    """Call a function and note every function of the user's that runs on the way."""
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
        if ran.frames < _MOST_FRAMES:
            ran.keep(frame.f_locals)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        return call()
    finally:
        sys.setprofile(before)


def is_users_file(filename: str) -> bool:
    """Tell whether a file is the user's or a model library's, not torch's, ours or the standard library's."""
    if filename.startswith("<") or not is_users(filename):
        return False
    return is_package(filename) or not filename.startswith(_LIBRARY)


def is_package(filename: str) -> bool:
    """Tell whether a file belongs to an installed package."""
    return filename.startswith(_PACKAGES)


def is_own_file(filename: str | None) -> bool:
    """Tell whether a file is one that the user wrote: no library's."""
    return filename is not None and is_users_file(filename) and not is_package(filename)
