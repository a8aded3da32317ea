"""Integers that note the numbers at which a comparison with them would turn out differently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Watched(int):
    """An integer in place of a counter. ``seen`` collects values of that counter at which a comparison changes."""

    seen: list[int]
    shift: int  # this number less the number in the place

    def __new__(cls, value: int, seen: list[int], shift: int = 0) -> Watched:  # noqa: D102  # see the class
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
        return Watched(result, self.seen, self.shift + int(by)) if type(result) is int else result

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


def watched_count(start: int, step: int, seen: list[int]) -> Iterator[Watched]:
    """Yield what ``itertools.count(start, step)`` yields, as integers that note comparisons."""
    ahead = 0
    while True:
        yield Watched(start + ahead, seen, ahead)
        ahead += step


__all__ = ["Watched", "watched_count"]
