"""``Holders``: which values of the last rank the script can still reach."""

from __future__ import annotations

from collections import Counter


class Holders:
    """How many lazy tensors stand for each value of the last rank, and reach each call."""

    def __init__(self) -> None:
        self._values: Counter[int] = Counter()
        self._calls: Counter[int] = Counter()
        self._dropped: list[int] = []
        self._dropped_calls: list[int] = []

    def add(self, key: int, calls: frozenset[int]) -> None:
        """Note that a lazy tensor stands for a value."""
        self._values[key] += 1
        self._calls.update(calls)

    def remove(self, key: int, calls: frozenset[int]) -> None:
        """Note that the script has dropped a lazy tensor. The garbage collector calls it: it only takes notes."""
        self._values[key] -= 1
        if not self._values[key]:
            self._dropped.append(key)
        self.leave(calls)

    def reach(self, calls: frozenset[int]) -> None:
        """Note that a lazy tensor reaches further calls."""
        self._calls.update(calls)

    def leave(self, calls: frozenset[int]) -> None:
        """Note that one lazy tensor less reaches these calls."""
        for call in calls:
            self._calls[call] -= 1
            if not self._calls[call]:
                self._dropped_calls.append(call)

    def drop(self, keys: list[int]) -> None:
        """Let values go for which no lazy tensor stands, once the commands so far have run."""
        self._dropped.extend(keys)
        self._values.update(dict.fromkeys(keys, 0))

    def take(self) -> tuple[list[int], list[int]]:
        """Return the values and calls that have been dropped since."""
        keys, self._dropped = self._dropped, []
        calls, self._dropped_calls = self._dropped_calls, []
        for key in keys:
            del self._values[key]
        return keys, calls
