"""Graph -> ``Profile``: what every node of a model costs on a device, at one or more microbatch sizes."""

from autopipe.measure.estimate import estimate
from autopipe.measure.measure import measure
from autopipe.measure.size import Captured

__all__ = ["Captured", "estimate", "measure"]
