"""A number that only a stage knows: how often one of its tensors was written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from autopipe.trace.explain import unsupported
from autopipe.trace.state.refusal import KEEP


class Unknown:
    """A number that only a stage knows. It can be printed, and nothing else."""

    def __init__(self, noting: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._noting = noting

    def __str__(self) -> str:
        return "?"

    def __format__(self, form: str) -> str:
        return "?"

    def _refuse(self, *_: object) -> Any:
        with self._noting():
            raise unsupported("how often a tensor was written (_version) is read", KEEP)

    __repr__ = __str__
    __lt__ = __gt__ = __le__ = __ge__ = __eq__ = __ne__ = __hash__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = _refuse
    __int__ = __index__ = __float__ = _refuse
