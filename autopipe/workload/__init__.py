"""The user's model file as a ``Workload``: build the model, feed it, compute its loss and step it.

The names are loaded when they are used, because they import torch: the rules for files and imports (``target``) do not.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopipe.workload.batches.data import DEFAULT_BATCH_SIZE
    from autopipe.workload.batches.items import Item
    from autopipe.workload.hooks.hook import HOOKS
    from autopipe.workload.load_options import LoadOptions
    from autopipe.workload.workload import Workload, load_workload

_MODULES = {
    "DEFAULT_BATCH_SIZE": "batches.data",
    "HOOKS": "hooks.hook",
    "Item": "batches.items",
    "LoadOptions": "load_options",
    "Workload": "workload",
    "load_workload": "workload",
}

__all__ = ["DEFAULT_BATCH_SIZE", "HOOKS", "Item", "LoadOptions", "Workload", "load_workload"]


def __getattr__(name: str) -> Any:
    """Load a name from its module. Raises: AttributeError for any other name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
