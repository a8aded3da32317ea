"""Record which user functions run in a call, and what their closures and classes are."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from autopipe.trace.lines.draws import profiled_by
from autopipe.trace.state.observing import bytecode
from autopipe.users_code import is_model_file

_MOST_FRAMES = 32  # calls of one function whose closure and class are kept

_NO_STATE = (Tensor, str, int, float, types.FunctionType, types.ModuleType)
_SEEDING = frozenset(("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state"))
_RANDOM = (f"torch{os.sep}random.py", f"torch{os.sep}cuda{os.sep}random.py")
_WRAPPING = (*_RANDOM, f"torch{os.sep}_compile.py", f"torch{os.sep}_dynamo{os.sep}eval_frame.py")


@dataclass
class Ran:
    """One function that ran."""

    code: types.CodeType
    globals: dict[str, Any]
    frames: int = 0  # calls so far
    classes: list[type] = field(default_factory=list)  # classes of ``self``, and values of ``cls``
    cells: list[tuple[str, Any]] = field(default_factory=list)  # variables of its closure that hold objects
    functions: list[types.FunctionType] | None = None  # those with this code, if they were looked up
    is_inner: bool = False  # whether it is defined by a call that goes on: its closure ends with that call

    def __post_init__(self) -> None:
        code = self.code
        self.closure = () if self.is_inner else tuple(name for name in code.co_freevars if name != "__class__")
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self.object_name = arguments[0] if arguments and bytecode.is_method(code) else ""

    @functools.cached_property
    def looked_up(self) -> frozenset[str]:
        """The names that the function may look up in a module."""
        return bytecode.looked_up(self.code)

    @functools.cached_property
    def stored(self) -> frozenset[str]:
        """The names of the attributes that the function assigns."""
        return bytecode.stored(self.code)

    @functools.cached_property
    def imported(self) -> tuple[str, ...]:
        """The names of the modules that the function imports when it runs."""
        return bytecode.imported(self.code)

    def keep(self, local: dict[str, Any]) -> None:
        """Keep what one call reaches by its closure and its class."""
        self.frames += 1
        for name in self.closure:
            value = local.get(name)
            is_state = value is not None and not isinstance(value, _NO_STATE)
            if is_state and not any(known == name and value is other for known, other in self.cells):
                self.cells.append((name, value))
        instance = local.get(self.object_name)
        kind = instance if isinstance(instance, type) else type(instance)
        if instance is not None and kind not in self.classes:
            self.classes.append(kind)


def observed(
    call: Callable[[], Any],
    into: dict[types.CodeType, Ran],
    seeding: Callable[[], None] = lambda: None,
) -> Any:
    """Call a function and record every user function that runs in it.

    ``seeding``: called when one of them seeds torch's generator.
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
                files[name] = is_model_file(name)
            if not files[name]:
                if code.co_name in _SEEDING and name.endswith(_RANDOM) and is_model_file(_caller(frame)):
                    seeding()
                return
            ran = into[code] = Ran(code, frame.f_globals, is_inner=bool(code.co_freevars) and _is_inner(frame))
        if ran.frames < _MOST_FRAMES:
            ran.keep(frame.f_locals)

    with profiled_by(profile):
        return call()


def _caller(frame: types.FrameType) -> str:
    """Return the file of the function that called this one of torch, through its wrappers."""
    outer: types.FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.endswith(_WRAPPING):
        outer = outer.f_back
    return outer.f_code.co_filename if outer is not None else "<none>"


def _is_inner(frame: types.FrameType) -> bool:
    """Return whether the function that defines the called one is running."""
    code, outer = frame.f_code, frame.f_back
    around = code.co_qualname.rpartition(".<locals>.")[0]
    while outer is not None:
        if outer.f_code.co_qualname == around and outer.f_code.co_filename == code.co_filename:
            return True
        outer = outer.f_back
    return False
