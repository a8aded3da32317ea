"""The user's model file as a ``Workload``: build the model, feed it, compute its loss and step it."""

from autopipe.workload.batches.data import DEFAULT_BATCH_SIZE
from autopipe.workload.batches.items import Item
from autopipe.workload.hooks.hook import HOOKS
from autopipe.workload.load_options import LoadOptions
from autopipe.workload.workload import Workload, load_workload

__all__ = ["DEFAULT_BATCH_SIZE", "HOOKS", "Item", "LoadOptions", "Workload", "load_workload"]
