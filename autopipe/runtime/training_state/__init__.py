"""The whole state of an optimizer and its scheduler, as JSON and tensors, and back into what the user's hooks build.

``describe`` reads the objects, ``restore`` puts a description into freshly built ones, ``merge`` makes one description
of several where a stage owns what several stages owned, and ``trial`` proves on a sample that nothing was lost.
Code never comes out of a checkpoint: functions and classes are those that the hooks build, and only what they hold is
stored.
"""

from autopipe.runtime.training_state.describe import Description, describe
from autopipe.runtime.training_state.nodes import LIVE, Node, UnstorableError, tensor_names
from autopipe.runtime.training_state.restore import MisfitError, restore

__all__ = ["LIVE", "Description", "MisfitError", "Node", "UnstorableError", "describe", "restore", "tensor_names"]
