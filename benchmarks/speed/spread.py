"""Figures with their spread: medians, quartiles, and ratios of two systems that ran in turn."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = 5


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the quartiles around it."""

    low: float
    middle: float
    high: float

    @staticmethod
    def of(figures: Sequence[float]) -> Spread:
        """Return the spread of at least one figure."""
        if len(figures) == 1:
            return Spread(figures[0], figures[0], figures[0])
        return Spread(*statistics.quantiles(figures, n=4, method="inclusive"))

    def text(self, form: str = ".3f") -> str:
        """Return the median and the quartiles, such as ``0.962 (0.958 to 0.965)``."""
        return f"{self.middle:{form}} ({self.low:{form}} to {self.high:{form}})"


def step_times(ends: Sequence[float], warm_up: int = 2) -> list[float]:
    """Return the seconds of a step, as means of up to BLOCKS blocks of consecutive steps.

    ``ends``: when each step ended. The first steps are the warm-up. A mean over several steps is the right figure where
    steps overlap, because they then take turns being short and long.
    """
    kept = ends[min(warm_up, len(ends) - 2) :]
    count = min(BLOCKS, len(kept) - 1)
    edges = [round(index * (len(kept) - 1) / count) for index in range(count + 1)]
    return [(kept[b] - kept[a]) / (b - a) for a, b in itertools.pairwise(edges)]


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Return the spread of the ratios of figures measured in turn, pair by pair."""
    return Spread.of([a / b for a, b in zip(above, below, strict=False)])


def verdict(value: float, bar: float, *, at_least: bool) -> str:
    """Return a bar and whether it holds, such as ``>= 0.96: yes``."""
    holds = value >= bar if at_least else value <= bar
    return f"{'>=' if at_least else '<='} {bar:g}: {'yes' if holds else 'no'}"
