"""Find out by running whether the loss depends on state that changes, where the source does not show who reads it.

A counter of an installed package may be read through a helper object, a local name or a property. Forward and loss run
with other values in its place: the next value, later values, and those that they compare it with. State that only a log
or a progress bar reads does not change the loss, whatever its value is.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import math
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from autopipe.trace.record.containers import CONTAINERS, attributes, length
from autopipe.trace.state.fingerprints import PLAIN, drawn, fingerprint, same_value
from autopipe.trace.state.observe import is_users_file
from autopipe.trace.state.places import put, slots, value_at
from autopipe.trace.state.snapshot import DRAWN, WHOLE, Place, Snapshot, is_users_object

_FAR = (1, 1_000, 1_000_000)  # changes ahead; the first is the next value
_MOST_VALUES = 16  # values that are tried in one place
_LONGER = 1_000  # entries that are added to a list of numbers or texts
_FEW = 8  # entries that are added to a list of anything else, such as tensors


@dataclass
class Probe:
    """Runs forward and loss with other values at places that change from run to run."""

    run: Callable[[], Any]  # runs forward and loss once, and returns the loss
    model: nn.Module
    last: Snapshot  # restored after each run
    _wanted: tuple[Any, ...] = ()

    def affecting(self, places: Sequence[Place], before: Snapshot) -> Place | None:
        """Return the first place whose value the loss depends on, or None. ``before``: the snapshot one run earlier."""
        tried = [changing for place in places for changing in Changing.at(place, before, self.last)]
        if not tried:
            return None
        try:
            self._wanted = self._outcome([])
            if self._outcome([]) != self._wanted:
                return None  # runs are not repeatable: a difference would show nothing
        except Exception:
            return None
        self._watch(tried)
        values = [(changing, changing.candidates()) for changing in tried]
        for index in range(max(len(candidates) for _, candidates in values)):
            chosen = [(one, candidates[index]) for one, candidates in values if index < len(candidates)]
            place = self._differing(chosen)
            if place is not None:
                return place
        return None

    def writer(self, owner: Any, key: Any) -> str:
        """Return the line (file, line and text) of the user's code that changes the value at a place, or ""."""
        tracer = _Tracer(owner, key)
        before = sys.gettrace()
        try:
            sys.settrace(tracer.call)
            with contextlib.suppress(Exception):  # the line may have run before a failure
                self.run()
            return tracer.where()
        finally:
            sys.settrace(before)
            self.last.restore()

    def _watch(self, places: list[Changing]) -> None:
        """Run once with numbers that note what they are compared with."""
        try:
            with contextlib.suppress(Exception):  # what was noted until then is of use
                for place in places:
                    place.watch()
                self.run()
        finally:
            self.last.restore()

    def _differing(self, chosen: list[tuple[Changing, Any]]) -> Place | None:
        """Return a place whose value changes the outcome, or None. All values are tried together first."""
        try:
            if self._outcome(chosen) == self._wanted:
                return None
        except Exception:  # a value that the code cannot handle, and that it may never reach
            if len(chosen) == 1:
                return None
        else:
            if len(chosen) == 1:
                return chosen[0][0].place
        middle = len(chosen) // 2
        return self._differing(chosen[:middle]) or self._differing(chosen[middle:])

    def _outcome(self, chosen: list[tuple[Changing, Any]]) -> tuple[Any, ...]:
        """Return the loss, and what else of the model a run may change, with these values at their places."""
        try:
            for changing, value in chosen:
                changing.set(value)
            loss = self.run()
            trained = tuple(parameter.requires_grad for parameter in self.model.parameters())
            parts = tuple((id(part), part.training) for part in self.model.modules())
        finally:
            for changing, _ in chosen:
                if changing.reset is not None:
                    changing.reset()
            self.last.restore()
        return loss.dtype, tuple(loss.shape), loss.contiguous().reshape(-1).view(torch.uint8).tolist(), trained, parts


@dataclass
class Changing:
    """A number (or what is counted like one) that can be replaced by a later one."""

    place: Place  # the place that changed, with the number in it or in its value
    value: Any  # after the last run
    step: Any  # the change of a number from run to run
    set: Callable[[Any], object]  # puts another value in the place
    reset: Callable[[], object] | None = None  # restores what a snapshot does not
    seen: list[int] = field(default_factory=list)  # numbers at which a comparison may turn out differently

    @classmethod
    def at(cls, place: Place, before: Snapshot, last: Snapshot) -> Iterator[Changing]:
        """Yield what can be replaced at a place that changed between two snapshots."""
        owner, key = last.owners[place[0]], place[1]
        if key == DRAWN:
            if isinstance(owner, itertools.count):
                yield from cls._counting(place, owner, last)
        elif key == WHOLE:
            yield cls(place, owner, 1, functools.partial(_lengthen, owner))
        elif isinstance(owner, np.ndarray):
            content = owner.copy()
            yield cls(place, 0, 1, lambda more: _fill(owner, content + more), lambda: _fill(owner, content))
        else:
            value = value_at(owner, key)
            if isinstance(value, tuple):
                for index, entry in enumerate(value):
                    if isinstance(entry, (int, float)):
                        yield cls(place, entry, 1, functools.partial(_put_entry, owner, key, index))
            elif isinstance(value, (int, float, np.number)):
                yield cls(place, value, _step(value, before.values.get(place, ())), functools.partial(put, owner, key))
            elif is_users_object(value) and not isinstance(value, nn.Module):
                for name, entry in {**(attributes(value) or {}), **slots(value)}.items():
                    if isinstance(entry, (int, float, np.number)):
                        yield cls(place, entry, 1, functools.partial(put, value, name))

    @classmethod
    def _counting(cls, place: Place, counter: Any, last: Snapshot) -> Iterator[Changing]:
        """Yield the places that hold an ``itertools.count``: it is replaced by another."""
        for (owner, key), kept in last.values.items():
            if kept[:1] == ("is",) and kept[1] is counter and owner in last.owners:
                yield cls(place, counter, 1, functools.partial(put, last.owners[owner], key))

    def candidates(self) -> list[Any]:
        """Return later values, in the order in which they are tried."""
        value, step = self.value, self.step
        if isinstance(value, bool):
            return [not value]
        if isinstance(value, itertools.count):
            start: Any = value.__reduce__()[1][0]
            return [itertools.count(start + many) for many in _FAR]
        if isinstance(value, CONTAINERS):
            return [_LONGER]
        later = [value + step * many for many in _FAR]
        ahead = sorted({number for number in self.seen if (number - value) * step > 0}, key=lambda n: abs(n - value))
        return list(dict.fromkeys((*later, *ahead)))[:_MOST_VALUES]

    def watch(self) -> None:
        """Put a number in the place that notes what it is compared with."""
        if type(self.value) is int:
            self.set(_Watched(self.value, self.seen))


def _step(value: Any, before: tuple[Any, ...]) -> Any:
    """Return the change of a number since its earlier fingerprint, or 1 if that is unknown."""
    kind, number = before[1] if before and before[0] == "==" and len(before[1]) == 2 else (None, 0)
    step = value - float(number) if kind in (int, float) else 1
    if not step or not math.isfinite(step):
        return 1
    return int(step) if isinstance(value, int) else step


def _put_entry(owner: Any, key: Any, index: int, value: Any) -> None:
    """Replace the tuple at a place by one with another entry."""
    entries = value_at(owner, key)
    put(owner, key, tuple.__new__(type(entries), (*entries[:index], value, *entries[index + 1 :])))


def _fill(array: Any, content: Any) -> None:
    array[...] = content


class _Watched(int):
    """An integer that notes the numbers at which a comparison with it would turn out differently."""

    seen: list[int]
    shift: int  # this number less the number in the place

    def __new__(cls, value: int, seen: list[int], shift: int = 0) -> _Watched:
        number = super().__new__(cls, value)
        number.seen, number.shift = seen, shift
        return number

    def _note(self, other: Any) -> None:
        if isinstance(other, (int, float)) and abs(other) < 2**53:
            self.seen.extend(int(other) - self.shift + near for near in (0, 1, -1))

    def _note_multiple(self, other: Any) -> None:
        if isinstance(other, int) and other:
            self._note(int(self) - int(self) % other + other)

    def _moved(self, result: Any, by: Any) -> Any:
        return _Watched(result, self.seen, self.shift + int(by)) if type(result) is int else result

    def __add__(self, other: Any) -> Any:
        return self._moved(int.__add__(self, other), other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        result = int.__sub__(self, other)
        return result if result is NotImplemented else self._moved(result, -other)

    def __lt__(self, other: Any) -> Any:
        self._note(other)
        return int.__lt__(self, other)

    def __le__(self, other: Any) -> Any:
        self._note(other)
        return int.__le__(self, other)

    def __gt__(self, other: Any) -> Any:
        self._note(other)
        return int.__gt__(self, other)

    def __ge__(self, other: Any) -> Any:
        self._note(other)
        return int.__ge__(self, other)

    def __eq__(self, other: Any) -> Any:
        self._note(other)
        return int.__eq__(self, other)

    def __ne__(self, other: Any) -> Any:
        self._note(other)
        return int.__ne__(self, other)

    __hash__ = int.__hash__

    def __mod__(self, other: Any) -> Any:
        self._note_multiple(other)
        return int.__mod__(self, other)

    def __floordiv__(self, other: Any) -> Any:
        self._note_multiple(other)
        return int.__floordiv__(self, other)


class _Tracer:
    """A trace function that finds the line of the user's code after which the value at a place is another."""

    def __init__(self, owner: Any, key: Any) -> None:
        self.owner, self.key = owner, key
        self.before = self._state()
        self.line: tuple[str, int] | None = None  # the line that runs
        self.writer: tuple[str, int] | None = None

    def _state(self) -> tuple[Any, ...]:
        if self.key == DRAWN:
            return "==", drawn(self.owner)
        if self.key == WHOLE:
            return "==", length(self.owner)
        return fingerprint(value_at(self.owner, self.key))

    def _look(self) -> None:
        if self.writer is None and self.line is not None and not same_value(self._state(), self.before):
            self.writer = self.line

    def call(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        """Trace a call, if it is one of the user's functions."""
        if self.writer is not None or not is_users_file(frame.f_code.co_filename):
            return None
        self._look()
        return self._step

    def _step(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        self._look()
        if event == "return":  # the rest of the caller's line runs now
            outer: types.FrameType | None = frame.f_back
            while outer is not None and not is_users_file(outer.f_code.co_filename):
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


def _lengthen(container: Any, many: int) -> None:
    """Add copies of the last entry to a container."""
    if isinstance(container, (list, deque)):
        base: Any = list if isinstance(container, list) else deque
        last = container[-1] if container else None
        base.extend(container, [last] * (many if type(last) in PLAIN else _FEW))
    elif isinstance(container, set):
        set.update(container, _unused(many))
    else:
        entry = next(reversed(dict.values(container)), None)
        dict.update(container, dict.fromkeys(_unused(many), entry))


def _unused(many: int) -> Iterator[int]:
    """Return numbers that are probably not a key yet."""
    return iter(range(2**40, 2**40 + many))


__all__ = ["Changing", "Probe"]
