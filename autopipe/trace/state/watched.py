"""Integers that note the numbers at which a comparison with them would turn out differently."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from autopipe.trace.record.containers import attributes

_LARGEST = 2**53  # comparisons with larger numbers are not noted
_MOST_KEYS = 256  # of one dict or set
_PERIODS = (0, 1, 100)  # periods of a remainder; a later one may also be beyond a threshold

Origin = Callable[[int], list[int]]


class Watched(int):
    """An integer in place of a counter, or computed from one."""

    seen: list[int]  # values of the counter at which a comparison changes
    origin: Origin  # the values of the counter at which this number is equal to another

    def __new__(cls, value: int, seen: list[int], origin: Origin = lambda other: [other]) -> Watched:
        """Return the integer with its notes."""
        number = super().__new__(cls, value)
        number.seen, number.origin = seen, origin
        return number

    def note(self, other: Any) -> None:
        """Note a comparison with a number."""
        if isinstance(other, (int, float)) and abs(other) < _LARGEST:
            self.seen.extend(value for near in (0, 1, -1) for value in self.origin(int(other) + near))

    def _note_multiple(self, other: Any) -> None:
        if isinstance(other, int) and other:
            self.note(int(self) - int(self) % other + other)

    def _computed(self, result: Any, origin: Origin) -> Any:
        return Watched(result, self.seen, origin) if type(result) is int else result

    def __add__(self, other: Any) -> Any:
        return self._computed(int.__add__(self, other), lambda result: self.origin(result - int(other)))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._computed(int.__sub__(self, other), lambda result: self.origin(result + int(other)))

    def __rsub__(self, other: Any) -> Any:
        return self._computed(int.__rsub__(self, other), lambda result: self.origin(int(other) - result))

    def __mul__(self, other: Any) -> Any:
        return self._computed(int.__mul__(self, other), lambda result: self.origin(result // int(other or 1)))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        self._note_multiple(other)
        return self._computed(int.__floordiv__(self, other), lambda result: self.origin(result * int(other)))

    def __mod__(self, other: Any) -> Any:
        self._note_multiple(other)
        return self._computed(int.__mod__(self, other), lambda result: self._with_remainder(result, int(other)))

    def __and__(self, other: Any) -> Any:
        if isinstance(other, int) and other > 0 and not other & (other + 1):
            return self % (other + 1)
        return int.__and__(self, other)

    def _with_remainder(self, remainder: int, divisor: int) -> list[int]:
        first = int(self) + (remainder - int(self)) % divisor
        return [value for many in _PERIODS for value in self.origin(first + many * divisor)]

    def __bool__(self) -> bool:
        self.note(0)
        return int.__bool__(self)

    def __lt__(self, other: Any) -> Any:
        self.note(other)
        return int.__lt__(self, other)

    def __le__(self, other: Any) -> Any:
        self.note(other)
        return int.__le__(self, other)

    def __gt__(self, other: Any) -> Any:
        self.note(other)
        return int.__gt__(self, other)

    def __ge__(self, other: Any) -> Any:
        self.note(other)
        return int.__ge__(self, other)

    def __eq__(self, other: Any) -> Any:
        self.note(other)
        return int.__eq__(self, other)

    def __ne__(self, other: Any) -> Any:
        self.note(other)
        return int.__ne__(self, other)

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
        return int.__hash__(self)


def _values_of(value: Any) -> list[Any]:
    """Return the attributes of an object and of its class, or the entries of a tuple."""
    if isinstance(value, tuple):
        return list(value)
    own = vars(value) if isinstance(value, type) else attributes(value)
    return [*(own or {}).values(), *vars(type(value)).values()]


def watched_count(start: int, step: int, seen: list[int]) -> Iterator[Watched]:
    """Yield what ``itertools.count(start, step)`` yields, as integers that note comparisons."""
    for draws in itertools.count():
        yield Watched(start + draws * step, seen, lambda result, ahead=draws * step: [result - ahead])  # type: ignore[misc]


__all__ = ["Watched", "watched_count"]
