"""``SearchProgress``: the progress of a search, and whether Ctrl-C ended it early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _ignore(what: str, fraction: float) -> None:
    """Discard progress."""


@dataclass(slots=True)
class SearchProgress:
    """The progress of one search."""

    report: Callable[[str, float], None] = _ignore  # called with (description of the problem, fraction done)
    stopped: bool = False  # an interrupt ended the search early, with the best plan so far
    tried: int = 0  # problems solved
    total: int = 0  # problems to solve, estimated

    def next(self, what: str) -> None:
        """Report the next problem."""
        self.report(what, self.tried / self.total if self.total else 0.0)
        self.tried += 1
