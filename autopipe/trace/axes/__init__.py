"""The axes along which a team of processes can shard a captured model."""

from autopipe.trace.axes.collect import Collector, ModelAxes
from autopipe.trace.axes.find import Reader
from autopipe.trace.axes.members import Members, TeamOutcome
from autopipe.trace.axes.verified import Verified, choose_verified, verified
from autopipe.trace.result import Capture

__all__ = ["Members", "ModelAxes", "TeamOutcome", "Verified", "choose_verified", "find_axes", "verified"]


def find_axes(capture: Capture) -> ModelAxes:
    """Return the axes of a capture, not yet verified. It reads the graph once, and runs nothing."""
    return Collector(capture.graph, Reader(capture.graph, capture.module).read()).collect()
