"""Graph to ``Profile``: the cost of every node of a model on a device, at one or more microbatch sizes."""

from autopipe.measure.estimate import estimate
from autopipe.measure.measure import measure
from autopipe.measure.subject import Captured

__all__ = ["Captured", "estimate", "measure"]
