"""Which attributes of its modules a forward reads and sets, seen while it runs.

The signature of a call has only those that a recorded forward has read. Counters and lists of the training loop on the
model are usually not read. ``vars(module)`` reads all.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from autopipe.script.codec import names_in
from autopipe.script.lazy import Lazy
from autopipe.script.refusals import EffectError
from autopipe.users_code import AUTOPIPE, library_of

Reads = frozenset[str] | None
"""Names of the attributes that forwards have read, on any module of the model; None: all that there are."""

_OF_MODULES = nn.modules.module.__file__


def is_read(reads: Reads, module: nn.Module, name: str) -> bool:
    """Return whether a forward may have read an attribute. The code of torch reads what it names."""
    return reads is None or name in reads or name in _names_of_torch(module)


def _names_of_torch(module: nn.Module) -> frozenset[str]:
    kind: Any = type(module)  # a class is hashable
    return _names_of(kind)


@functools.cache
def _names_of(kind: Any) -> frozenset[str]:
    return names_in(next(owner for owner in kind.__mro__ if str(owner.__module__).startswith("torch.nn.")))


class Accesses:
    """The first access of one forward to each attribute of a model's modules: True for a read, False for a write."""

    def __init__(self, model: nn.Module) -> None:
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.first: dict[tuple[int, str], bool] = {}
        self.error: EffectError | None = None  # the forward may catch it
        self._whole = False

    def reads(self, ignored: set[tuple[int, str]]) -> Reads:
        """Return the names of what was read or set, but for ``ignored``."""
        return None if self._whole else frozenset(name for key, name in self.first if (key, name) not in ignored)

    def is_set_first(self, module: nn.Module, name: str) -> bool:
        """Return whether the forward set an attribute before it, or code of torch, could read it."""
        return self.first.get((id(module), name)) is False and name not in _names_of_torch(module)

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Observe inside. Raises: EffectError if the forward reads what an earlier call has set to an output."""
        kind: Any = nn.Module
        put = kind.__setattr__

        def get(module: Any, name: str) -> Any:
            key = id(module)
            if key in self.paths and name == "__dict__":
                file = sys._getframe(1).f_code.co_filename
                self._whole |= file != _OF_MODULES and library_of(file) != AUTOPIPE
            read = key in self.paths and self.first.setdefault((key, name), True)
            value = object.__getattribute__(module, name)
            if read and isinstance(value, Lazy):
                path = self.paths[key]
                what = f"the forward reads {f'{path}.' if path else ''}{name}, an output of an earlier call"
                self.error = EffectError(what, remedy="pass it as an argument, with detach()")
                raise self.error
            return value

        def set_(module: Any, name: str, value: Any) -> None:
            if id(module) in self.paths:
                self.first.setdefault((id(module), name), False)
            put(module, name, value)

        kind.__getattribute__, kind.__setattr__ = get, set_
        try:
            yield
        finally:
            del kind.__getattribute__
            kind.__setattr__ = put
        if self.error is not None:
            raise self.error
