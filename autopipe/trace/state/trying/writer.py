"""Find the line of the user's code that changes the value at a place, by tracing a run."""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Callable
from typing import Any

from autopipe.trace.record.containers import length
from autopipe.trace.state.snapshots.arrays import is_array, numbers
from autopipe.trace.state.snapshots.fingerprints import drawn, fingerprint, same_value
from autopipe.trace.state.snapshots.places import value_at
from autopipe.trace.state.snapshots.settings import Settings
from autopipe.trace.state.snapshots.snapshot import DRAWN, WHOLE
from autopipe.users_code import is_model_file, is_own_file


def writing_line(run: Callable[[], object], owner: Any, key: Any) -> str:
    """Return the line (file, line and text) after which the value at a place is another, or ""."""
    tracer = _Tracer(owner, key)
    before = sys.gettrace()
    try:
        sys.settrace(tracer.call)
        run()
        return tracer.where()
    finally:
        sys.settrace(before)


class _Tracer:
    """A trace function that finds the line of the user's code after which the value at a place is another."""

    def __init__(self, owner: Any, key: Any) -> None:
        self.owner, self.key = owner, key
        # numpy's own functions set its settings
        self._is_traced = is_own_file if isinstance(owner, Settings) else is_model_file
        self.before = self._state()
        self.line: tuple[str, int] | None = None  # the line that runs
        self.writer: tuple[str, int] | None = None

    def _state(self) -> tuple[Any, ...]:
        if self.key == DRAWN:
            return "==", drawn(self.owner)
        if self.key == WHOLE:
            return "==", length(self.owner)
        if isinstance(self.owner, Settings):
            return "==", self.owner.read(self.key)
        if is_array(self.owner):
            return numbers(self.owner)
        return fingerprint(value_at(self.owner, self.key))

    def _look(self) -> None:
        if self.writer is None and self.line is not None and not same_value(self._state(), self.before):
            self.writer = self.line

    def call(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        """Trace a call, if it is one of the user's functions."""
        if self.writer is not None or not self._is_traced(frame.f_code.co_filename):
            return None
        self._look()
        return self._step

    def _step(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        self._look()
        if event == "return":  # the rest of the caller's line runs now
            outer: types.FrameType | None = frame.f_back
            while outer is not None and not self._is_traced(outer.f_code.co_filename):
                outer = outer.f_back
            self.line = (outer.f_code.co_filename, outer.f_lineno) if outer is not None else self.line
        else:
            self.line = frame.f_code.co_filename, frame.f_lineno
        return self._step

    def where(self) -> str:
        """Return the line that was found, with its text."""
        self._look()
        if self.writer is None:
            return ""
        text = linecache.getline(*self.writer).strip()
        return f"{self.writer[0]}:{self.writer[1]}" + (f": {text}" if text else "")


__all__ = ["writing_line"]
