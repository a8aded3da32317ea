"""What a rank tells the outside while it runs: where it is, and what it finished."""

from __future__ import annotations

from typing import Any, Protocol


class Reporter(Protocol):
    """Takes a rank's events. All of it must be cheap: ``at`` is called for every instruction."""

    def at(self, instruction: str, *, waiting: bool) -> None:
        """Say what the rank is doing now, and whether it waits for another rank in it."""

    def event(self, kind: str, **fields: Any) -> None:
        """Say that something happened; the fields are JSON values."""

    def may_begin(self, step: int, end: int) -> bool:
        """Say whether the minibatches from ``step`` to before ``end`` may begin; every rank gets the same answers.

        No: the run is to stop before ``step``, cleanly.
        """


class Silent:
    """Takes everything, keeps the last instruction."""

    def __init__(self) -> None:
        self.last = ""

    def at(self, instruction: str, *, waiting: bool) -> None:
        """Keep it for an error message."""
        self.last = instruction

    def event(self, kind: str, **fields: Any) -> None:
        """Let it pass."""

    def may_begin(self, step: int, end: int) -> bool:
        """Go on: nobody stops it."""
        return True
