"""``SizeMeasurement``: one microbatch size, measured in windows: walk the nodes, time the segments, time the whole."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from torch import Tensor

from autopipe.ir.profile import Measurement
from autopipe.measure.clock import Clock
from autopipe.measure.facts import NodeFacts, walk_nodes
from autopipe.measure.segment_costs import SegmentCosts
from autopipe.measure.segments import segments
from autopipe.measure.subject import Captured, Progress, Subject, no_progress
from autopipe.measure.whole import WholeModel

LEAST_SECONDS = 1e-3
"""A shorter segment is joined with its neighbours: the clock and the start of autograd would dominate its time."""


class SizeMeasurement:
    """Measures a model at one microbatch size."""

    def __init__(
        self,
        capture: Captured,
        clock: Clock,
        size: int,
        batch: Mapping[str, Tensor],
        *,
        progress: Progress = no_progress,
        least_seconds: float = LEAST_SECONDS,
    ) -> None:
        self.subject = Subject(capture, clock, size, batch)
        self.progress = progress
        self.whole = WholeModel(self.subject)
        self.num_windows = 0
        self._least_seconds = least_seconds
        self._measured: tuple[NodeFacts, SegmentCosts] | None = None  # None before the first window

    def window(self) -> None:
        """Time the segments and the complete model once more. The first window begins with a walk over the nodes.

        Raises: ProfileError as ``measure`` does.
        """
        facts, segment_costs = self._prepared()
        segment_costs.window(self.progress)
        self.progress("the whole model", 0.8)
        self.whole.window(segment_costs.nodes, facts.replaced)
        self.num_windows += 1

    def _prepared(self) -> tuple[NodeFacts, SegmentCosts]:
        if self._measured is None:
            facts = walk_nodes(self.subject, self.progress)
            seconds = [facts.seconds[node.name][0] for node in self.subject.graph.nodes]
            bounds = segments(self.subject.graph, seconds, self._least_seconds)
            self._measured = facts, SegmentCosts(self.subject, facts, bounds)
        return self._measured

    def allows(self, size: int, seconds: float) -> bool:
        """Return whether a larger size, by the figures of this one, takes at most these seconds for a forward and a
        backward, and fits half of the memory.
        """
        scale, costs = size / self.subject.size, self.segments.nodes.values()
        own = sum(cost.forward_seconds + cost.backward_seconds for cost in costs)
        fits = self.whole.windows is not None and self.whole.fits(self.segments.nodes, 2 * scale)
        return fits and scale > 1 and scale * own <= seconds

    @property
    def segments(self) -> SegmentCosts:
        """The costs of the segments; walks the nodes first if no window was taken."""
        return self._prepared()[1]

    def measurement(self) -> Measurement:
        """Return the result of all windows; takes the first window if there was none."""
        if not self.num_windows:
            self.window()
        facts, costs = self._prepared()
        scaled = self.whole.scaled(costs.nodes, len(costs.distinct), len(costs.bounds))
        spread = self._spread(costs)
        return Measurement(self.subject.size, scaled, spread, costs.keepers, facts.work, facts.casts)

    def _spread(self, costs: SegmentCosts) -> float:
        if self.whole.spread is not None:
            return self.whole.spread
        spreads = [spread for cost in costs.distinct.values() if (spread := cost.windows.spread) is not None]
        return statistics.median(spreads) if spreads else 0.0
