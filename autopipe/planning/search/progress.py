"""``SearchProgress``: the progress of a search, and whether Ctrl-C ended it with the best plan so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _unseen(what: str, fraction: float) -> None:
    """Discard progress."""


@dataclass(slots=True)
class SearchProgress:
    """The progress of one search."""

    report: Callable[[str, float], None] = _unseen  # called with (what is tried, the fraction done)
    stopped: bool = False  # an interrupt ended the search, and the best plan so far was returned
    tried: int = 0  # problems solved
    total: int = 0  # problems to solve, estimated

    def next(self, what: str) -> None:
        """Report the next problem."""
        self.report(what, self.tried / self.total if self.total else 0.0)
        self.tried += 1
