"""Successive halving: at certain steps the jobs wait for one another, and only the best go on.

Source: Jamieson and Talwalkar, arXiv:1502.07943, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Halving:
    """The steps at which jobs are compared, and the share of them that goes on."""

    at: tuple[int, ...]  # optimizer steps, ascending
    keep: float  # of the jobs that reached a step, above 0 and below 1

    def target(self, rung: int, steps: int) -> int:
        """Return the step up to which a job trains that has passed ``rung`` comparisons. ``steps``: of the job."""
        return min(self.at[rung], steps) if rung < len(self.at) else steps


def best(metrics: Mapping[int, float | None], keep: float) -> set[int]:
    """Return the jobs that go on: the share ``keep`` with the lowest metrics, rounded up.

    ``metrics``: by job; None and NaN are the worst. Of equal ones, the first goes on.
    """
    order = sorted(metrics, key=lambda job: (_rank(metrics[job]), job))
    return set(order[: math.ceil(keep * len(order))])


def _rank(metric: float | None) -> float:
    return math.inf if metric is None or math.isnan(metric) else metric
