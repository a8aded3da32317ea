"""``RankRows``: what one rank runs for a window of minibatches, and for an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopipe.ir.schedule import Op, Schedule, StageEdges
from autopipe.runtime.context import RunContext
from autopipe.schedules import REGISTRY, Turn, lower, make, turns, validate
from autopipe.schedules.spilling.spill import MESSAGES, spill

# windows of several minibatches differ in their replicas, and in their lengths where a checkpoint ends them
_KEPT = 8


@dataclass(slots=True)
class RankRows:
    """The rows of a rank. Equal ones are built once."""

    context: RunContext
    rank: int
    # by first minibatch and number of minibatches
    _rows: dict[tuple[int, int], tuple[Turn, ...]] = field(default_factory=dict)
    # how many steps old the weights of a minibatch are, at most
    _staleness: int = field(init=False)

    def __post_init__(self) -> None:
        self._staleness = max(make(self.context.plan.schedule, self.context.request).staleness)

    def of_window(self, first: int, count: int) -> tuple[Sequence[Turn], int]:
        """Return the row for ``count`` minibatches from ``first`` on, and what to add to its numbers of minibatches."""
        base = self._base(first)
        return self._row(base, count), first - base

    def _base(self, first: int) -> int:
        """Return the earliest minibatch from which a window has the same row, shifted.

        The replica that runs a microbatch repeats with a period. A minibatch that overlaps with others uses weights
        that are some steps old, except the first ones, which use the initial weights.
        """
        period = math.lcm(*(stage.replicas for stage in self.context.plan.stages))
        return first if first < self._staleness else self._staleness + (first - self._staleness) % period

    def _row(self, first: int, count: int) -> tuple[Turn, ...]:
        if (first, count) not in self._rows:
            request = replace(self.context.request, first_minibatch=first, num_minibatches=count)
            schedule = make(self.context.plan.schedule, request)
            validate(schedule)
            long = [key for key in self._rows if key[1] > 1]
            for key in long[: max(len(long) - _KEPT + 1, 0)]:
                del self._rows[key]
            self._rows[first, count] = self._turns(schedule, self.context.message_plan.edges)
        return self._rows[first, count]

    def forward_only(self) -> tuple[Turn, ...]:
        """Return the forwards of this rank, in the order of the run's schedule."""
        kind, request = REGISTRY[self.context.plan.schedule], self.context.request
        schedule = make(kind.name, request)
        forward = tuple(tuple(i for i in row if i.op == Op.FORWARD) for row in schedule.rows)
        schedule = replace(schedule, rows=forward)
        if kind.spills:
            schedule = spill(schedule, messages=bool(request.options.get(MESSAGES.name)))
        return self._turns(schedule, StageEdges(self.context.message_plan.edges.forward, ()))

    def _turns(self, schedule: Schedule, edges: StageEdges) -> tuple[Turn, ...]:
        return turns(lower(schedule, edges), self.rank)
