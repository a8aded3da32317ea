"""Finds the line that draws from Python's or numpy's generators: their functions are C code, which no patch reaches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopipe.trace.explain import Line, is_users, lines_of, own_and_inner, place_in
from autopipe.trace.lines.owner import STANDARD, library_of
from autopipe.trace.recorder import Recorder


class DrawingLine:
    """A context that traces the user's lines and looks after each of them whether something was drawn.

    ``drawn``: returns the name of the generator that was drawn from since the start, or "". ``where``: the first line
    that drew, as errors show it; "" where none did. Lines of Python's own modules (``random.choice``) count for the
    line that calls them.
    """

    def __init__(self, drawn: Callable[[], str]) -> None:
        self.where = ""
        self._drawn = drawn
        self._lines: list[Line] = []  # the line that began last, and those around it, innermost first
        self._traced: dict[str, bool] = {}
        self._before: Any = None

    def __enter__(self) -> DrawingLine:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in self._traced:
            self._traced[name] = is_users(name) and not name.startswith("<") and library_of(name) != STANDARD
        if not self._traced[name] or self.where:
            return None
        self._look()
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, _: Any) -> Any:
        self._look()
        if self.where:
            return None
        # behind a return, the line that made the call goes on
        self._lines = lines_of(frame.f_back if event == "return" else frame)
        return self._stepped

    def _look(self) -> None:
        if not self.where and self._lines and self._drawn():
            own, inner = own_and_inner(self._lines)
            self.where = place_in(own, inner)


def is_drawn(recorder: Recorder, error: Exception) -> bool:
    """Tell whether torch drew what the failed call or comparison reads, and the batch has no part in it."""
    known = recorder.known
    stack = [known.node(tensor) for tensor in recorder.operands if known.has(tensor)]
    if isinstance(error, GuardOnDataDependentSymNode):
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
