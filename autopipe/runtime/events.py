"""``Reporter``: the interface through which a rank reports its progress."""

from __future__ import annotations

from typing import Any, Protocol


class Reporter(Protocol):
    """Takes the events of a rank. Every method must be cheap: ``at`` is called for every instruction."""

    def at(self, instruction: str, *, waiting: bool) -> None:
        """Report the current instruction, and whether it waits for another rank."""

    def event(self, kind: str, **fields: Any) -> None:
        """Report an event. The fields are JSON values."""

    def may_begin(self, step: int, end: int) -> bool:
        """Return whether the minibatches from ``step`` to before ``end`` may begin. Every rank gets the same answers.

        False: the run must stop before ``step``.
        """


class Silent:
    """Ignores all events. Keeps the last instruction."""

    def __init__(self) -> None:
        self.last = ""

    def at(self, instruction: str, *, waiting: bool) -> None:
        """Keep the instruction for an error message."""
        self.last = instruction

    def event(self, kind: str, **fields: Any) -> None:
        """Ignore the event."""

    def may_begin(self, step: int, end: int) -> bool:
        """Return True: nothing stops the run."""
        return True
