"""Record which user functions run in a call, and with which arguments."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor

from autopipe.errors import TraceError
from autopipe.trace.explain import here
from autopipe.trace.lines.draws import profiled_by
from autopipe.trace.state.observing import bytecode
from autopipe.users_code import is_model_file

_MOST_FRAMES = 32  # calls of one function whose arguments are kept

_SEEDING = frozenset(("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state"))
_RANDOM = (f"torch{os.sep}random.py", f"torch{os.sep}cuda{os.sep}random.py")
_WRAPPING = (*_RANDOM, f"torch{os.sep}_compile.py", f"torch{os.sep}_dynamo{os.sep}eval_frame.py")


@dataclass
class Ran:
    """One function that ran."""

    code: types.CodeType
    globals: dict[str, Any]
    names: dict[str, list[Any]] = field(default_factory=dict)  # argument -> its values, without tensors
    frames: int = 0  # calls so far
    classes: list[type] = field(default_factory=list)  # classes of ``self``, and values of ``cls``
    cells: list[tuple[str, Any]] = field(default_factory=list)  # variables of its closure that hold objects
    functions: list[types.FunctionType] | None = None  # those with this code, if they were looked up
    is_inner: bool = False  # whether it is defined by a call that goes on: its closure ends with that call

    def __post_init__(self) -> None:
        code = self.code
        self.arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self.closure = () if self.is_inner else tuple(name for name in code.co_freevars if name != "__class__")
        self.object_name = self.arguments[0] if self.arguments and bytecode.is_method(code) else ""

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

    def keep(self, local: dict[str, Any]) -> bool:
        """Keep the arguments of one call. Return whether it reaches a class or closure that no call before it did."""
        self.frames += 1
        is_new = False
        for name in (*self.arguments, *self.code.co_freevars):
            value = local.get(name)
            if value is not None and not isinstance(value, (Tensor, str, int, float)):
                known = self.names.setdefault(name, [])
                if not any(value is other for other in known):
                    known.append(value)
                    if name in self.closure and not isinstance(value, (types.FunctionType, types.ModuleType)):
                        self.cells.append((name, value))
                        is_new = True
        instance = local.get(self.object_name)
        kind = instance if isinstance(instance, type) else type(instance)
        if instance is None or kind in self.classes:
            return is_new
        self.classes.append(kind)
        return True


def observed(
    call: Callable[[], Any],
    into: dict[types.CodeType, Ran],
    first: Callable[[Ran], None] = lambda ran: None,
    seeding: Callable[[], None] = lambda: None,
) -> Any:
    """Call a function and record every user function that runs in it.

    ``first``: called with each of those functions just before its first run, and before its first run with an object of
    another class, or with other objects in its closure. ``seeding``: called when one of them seeds torch's generator.
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
            ran.keep(frame.f_locals)
            first(ran)
        elif ran.frames < _MOST_FRAMES and ran.keep(frame.f_locals):
            first(ran)

    with profiled_by(profile):
        return call()


def refuse_seed() -> NoReturn:
    """Raise the TraceError for a forward or loss that seeds torch's generator."""
    raise TraceError(
        "the forward or the loss seeds torch's random numbers: a run seeds every operation by its place, so the call "
        "has no effect",
        where=here(),
        remedy="remove the call; register random numbers that are equal in every step as a buffer",
    )


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
