"""Find the line that draws from Python's or numpy's generators, whose functions are C code and cannot be patched."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import fx

from autopipe.trace.explain import Line, is_undecided, lines_of, own_and_inner, place_in, users_frame
from autopipe.trace.record.recorder import Recorder
from autopipe.users_code import is_model_file

_PYTHONS = random.random.__self__  # type: ignore[attr-defined]  # the generator behind the functions of the module
_DRAWS = ("random", "getrandbits")  # all its functions draw with these


class DrawingLine:
    """A context that finds the line that draws from the generator of Python's random, or of numpy.

    A profile function receives every call of Python's generator. Calls of numpy's generator are not reported, because
    it is not a builtin function: the lines of the user's code are traced instead, and the generator's state is compared
    after each.

    ``drawn``: returns whether numpy's generator was drawn from since the start; None to find draws from Python's.
    ``where``: the first line that drew, in the form that errors show, or "". A draw in Python's own modules
    (``random.choice``) counts for the line that called them.
    """

    def __init__(self, drawn: Callable[[], bool] | None) -> None:
        self.where = ""
        self._drawn = drawn
        self._frame: FrameType | None = None  # frame of the current line
        self._line = 0
        self._traced: dict[str, bool] = {}
        self._before: Any = None  # the trace function of the caller
        self._profiler = profiled_by(self._profiled if drawn is None else None)

    def __enter__(self) -> DrawingLine:
        self._before = sys.gettrace()
        self._profiler.__enter__()
        if self._drawn is not None:
            sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        self._profiler.__exit__(None, None, None)
        sys.settrace(self._before)

    def _profiled(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or self.where or getattr(function, "__self__", None) is not _PYTHONS:
            return
        if function.__name__ in _DRAWS:
            self._name_place(lines_of(frame))

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in self._traced:
            self._traced[name] = is_model_file(name)
        if not self._traced[name] or self.where:
            return None
        self._look()
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, _: Any) -> Any:
        self._look()
        if self.where:
            return None
        # after a return, the calling line continues
        self._frame = users_frame(frame.f_back) if event == "return" else frame
        self._line = 0 if self._frame is None else self._frame.f_lineno
        return self._stepped

    def _look(self) -> None:
        if self._frame is not None and self._drawn is not None and not self.where and self._drawn():
            _, *around = lines_of(self._frame)
            self._name_place([(self._frame.f_code.co_filename, self._line), *around])

    def _name_place(self, lines: list[Line]) -> None:
        if lines:
            own, inner = own_and_inner(lines)
            self.where = place_in(own, inner)


def is_drawn(recorder: Recorder, error: Exception) -> bool:
    """Return whether the failed call or comparison reads a random draw of torch and does not depend on the batch."""
    known = recorder.writer.known
    stack = [known.node(tensor) for tensor in recorder.operands if known.has(tensor)]
    if is_undecided(error):
        numbers = (recorder.symbols.read_from(symbol) for symbol in error.cond.free_symbols)
        stack.extend(node for node in numbers if node is not None)
    seen: set[fx.Node] = set()
    drawn = False
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            return False
        drawn = drawn or node.meta.get("random", (0, 0))[1] > 0
        stack.extend(node.all_input_nodes)
    return drawn


@contextlib.contextmanager
def profiled_by(profile: Callable[..., Any] | None) -> Iterator[None]:
    """Replace the profiler; None: leave it. At the end, that of the caller is in place again, such as cProfile's."""
    before = sys.getprofile()
    if profile is not None:
        sys.setprofile(profile)
    try:
        yield
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        elif profile is not None:
            sys.setprofile(None)
            before.enable()  # it is not a function
