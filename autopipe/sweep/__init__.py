"""``autopipe.sweep(...)``, and the modules behind it.

The package has the name of the function, so it can be called: ``autopipe.sweep`` is this module as soon as one of its
modules is imported.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """A module that is called as ``autopipe.sweep.api.sweep``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a sweep; see ``autopipe.sweep.api.sweep``."""
        from autopipe.sweep.api import sweep

        return sweep(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
