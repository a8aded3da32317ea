"""The complete state of an optimizer and its scheduler as JSON and tensors, restored into what the user's hooks build.

``describe`` reads the objects. ``restore`` writes a description into newly built ones. ``merge`` combines the
descriptions of several stages for a stage with other parameters. ``trial`` proves on a sample that nothing is lost.
Code is never loaded from a checkpoint: functions and classes are those that the hooks build, and only their state is
stored.
"""

from autopipe.runtime.training_state.describe import Description, describe
from autopipe.runtime.training_state.nodes import LIVE, Node, UnstorableError, tensor_names
from autopipe.runtime.training_state.restore import MisfitError, restore

__all__ = ["LIVE", "Description", "MisfitError", "Node", "UnstorableError", "describe", "restore", "tensor_names"]
