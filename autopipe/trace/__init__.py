"""``Workload`` -> ``Graph`` and ``GraphModule``: the training forward of an unmodified model, with its loss."""

from autopipe.trace.api import capture
from autopipe.trace.graph.replay import Replay, context_of, replay
from autopipe.trace.record.targets import qualified_name
from autopipe.trace.result import Capture, with_own_constants

__all__ = ["Capture", "Replay", "capture", "context_of", "qualified_name", "replay", "with_own_constants"]
