"""``SearchProgress``: who follows a search that may take long, and how Ctrl-C ends it with the best that was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _unseen(what: str, fraction: float) -> None:
    """Take progress that nobody watches."""


@dataclass(slots=True)
class SearchProgress:
    """One search, watched. ``report``: (what is tried, the part that is done: 0 to 1).

    ``stopped``: an interrupt came after something had been found, which is then the answer. ``tried`` of ``total``
    problems were solved by then.
    """

    report: Callable[[str, float], None] = _unseen
    stopped: bool = False
    tried: int = 0
    total: int = 0

    def next(self, what: str) -> None:
        """Say what is tried now."""
        self.report(what, self.tried / self.total if self.total else 0.0)
        self.tried += 1
