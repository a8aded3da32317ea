"""Numbers that note the values of a counter at which a comparison with them would turn out differently."""

from __future__ import annotations

import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from autopipe.trace.record.containers import attributes

_LARGEST = 2**53  # comparisons with larger numbers are not noted
_MOST_KEYS = 256  # of one dict or set
_PERIODS = (0, 1, 100)  # periods of a remainder; a later one may also be beyond a threshold

Origin = Callable[[Any], list[Any]]


class _Watched:
    """A number in place of a counter, or computed from one."""

    seen: list[Any]  # values of the counter at which a comparison changes
    origin: Origin  # the values of the counter at which this number is equal to another
    base: Any = None  # int or float

    def note(self, other: Any) -> None:
        """Note a comparison with a number."""
        other = other.item() if isinstance(other, np.number) else other
        if isinstance(other, (int, float)) and abs(other) < _LARGEST:
            number = float(other) if self.base is float else int(other)
            for near in self._near(number):
                self.seen.extend(self.origin(near))

    def _plain(self) -> Any:
        """Return the number without its notes."""
        return self.base.__pos__(self)

    def _near(self, number: Any) -> tuple[Any, ...]:
        if self.base is int:
            return number, number + 1, number - 1
        return number, math.nextafter(number, math.inf), math.nextafter(number, -math.inf)

    def _note_multiple(self, other: Any) -> None:
        if isinstance(other, int) and other:
            self.note(self._plain() - self._plain() % other + other)

    def _computed(self, name: str, other: Any, origin: Origin) -> Any:
        other = other.item() if isinstance(other, np.number) else other
        kind: Any = float if isinstance(other, float) else self.base
        result = getattr(kind, name)(kind(self._plain()), other)
        return watched(result, self.seen, origin)

    def __add__(self, other: Any) -> Any:
        return self._computed("__add__", other, lambda result: self.origin(result - other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._computed("__sub__", other, lambda result: self.origin(result + other))

    def __rsub__(self, other: Any) -> Any:
        return self._computed("__rsub__", other, lambda result: self.origin(other - result))

    def __mul__(self, other: Any) -> Any:
        return self._computed("__mul__", other, lambda result: self._quotients(result, other))

    __rmul__ = __mul__

    def _quotients(self, result: Any, other: Any) -> list[Any]:
        if not other:
            return []
        if self.base is float:
            return self.origin(result / other)
        return [value for near in (0, 1, -1) for value in self.origin(int(result // other) + near)]

    def __truediv__(self, other: Any) -> Any:
        return self._computed("__truediv__", other, lambda result: self._products(result, other))

    def _products(self, result: Any, other: Any) -> list[Any]:
        product = result * other
        if self.base is float:
            return self.origin(product)
        return [value for near in (0, 1, -1) for value in self.origin(math.floor(product) + near)]

    def __floordiv__(self, other: Any) -> Any:
        self._note_multiple(other)
        return self._computed("__floordiv__", other, lambda result: self.origin(result * other))

    def __mod__(self, other: Any) -> Any:
        self._note_multiple(other)
        return self._computed("__mod__", other, lambda result: self._with_remainder(result, other))

    def _with_remainder(self, remainder: Any, divisor: Any) -> list[Any]:
        first = self._plain() + (remainder - self._plain()) % divisor
        return [value for many in _PERIODS for value in self.origin(first + many * divisor)]

    def __neg__(self) -> Any:
        return watched(-self._plain(), self.seen, lambda result: self.origin(-result))

    def __floor__(self) -> Any:
        whole = lambda result: self.origin(self.base(result))  # noqa: E731
        return watched(math.floor(self._plain()), self.seen, whole)

    def __int__(self) -> int:
        self._note_constants(sys._getframe(1))
        return int(self.base.__int__(self))

    def __float__(self) -> float:
        self._note_constants(sys._getframe(1))
        return float(self.base.__float__(self))

    def _note_constants(self, frame: types.FrameType) -> None:
        """Note the numbers in the calling function: the result of a conversion notes no comparisons."""
        for constant in frame.f_code.co_consts:
            if type(constant) in (int, float):
                self.note(constant)

    def __bool__(self) -> bool:
        self.note(0)
        return bool(self.base.__bool__(self))

    def __lt__(self, other: Any) -> Any:
        return self._compared("__lt__", other)

    def __le__(self, other: Any) -> Any:
        return self._compared("__le__", other)

    def __gt__(self, other: Any) -> Any:
        return self._compared("__gt__", other)

    def __ge__(self, other: Any) -> Any:
        return self._compared("__ge__", other)

    def __eq__(self, other: Any) -> Any:
        return self._compared("__eq__", other)

    def __ne__(self, other: Any) -> Any:
        return self._compared("__ne__", other)

    def _compared(self, name: str, other: Any) -> Any:
        self.note(other)
        return getattr(self.base, name)(self._plain(), other)

    def __hash__(self) -> int:
        """Note the keys of dicts and sets that the calling function may look this number up in."""
        frame = sys._getframe(1)
        named = (frame.f_globals.get(name) for name in frame.f_code.co_names)
        reached = [*frame.f_locals.values(), *named, *frame.f_code.co_consts]
        inner = [value for one in reached for value in _values_of(one)]
        for container in (*reached, *inner):
            if isinstance(container, (dict, set, frozenset)):
                for key in itertools.islice(container, _MOST_KEYS):
                    if type(key) is int:
                        self.note(key)
        return int(self.base.__hash__(self))


class WatchedInt(_Watched, int):
    """An integer that notes comparisons."""

    base = int

    def __and__(self, other: Any) -> Any:
        if isinstance(other, int) and other > 0 and not other & (other + 1):
            return self % (other + 1)
        return int.__and__(self, other)

    def __rshift__(self, other: Any) -> Any:
        return self // (1 << int(other))


class WatchedFloat(_Watched, float):
    """A float that notes comparisons."""

    base = float


def watched(value: Any, seen: list[Any], origin: Origin = lambda other: [other]) -> Any:
    """Return an int or a float with its notes, or another value as it is."""
    if type(value) not in (int, float):
        return value
    number: Any = WatchedInt(value) if type(value) is int else WatchedFloat(value)
    number.seen, number.origin = seen, origin
    return number


def _values_of(value: Any) -> list[Any]:
    """Return the attributes of an object and of its class, or the entries of a tuple."""
    if isinstance(value, tuple):
        return list(value)
    own = vars(value) if isinstance(value, type) else attributes(value)
    return [*(own or {}).values(), *vars(type(value)).values()]


def watched_count(start: int, step: int, seen: list[int]) -> Iterator[Any]:
    """Yield what ``itertools.count(start, step)`` yields, as integers that note comparisons."""
    for draws in itertools.count():
        yield watched(start + draws * step, seen, lambda result, ahead=draws * step: [result - ahead])  # type: ignore[misc]


__all__ = ["watched", "watched_count"]
