"""Commands that wait and measure less, for tests with another subject.

A model is measured in fewer windows of time: its plan may be less precise, which changes no result of training.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

WINDOWS = 3


def shorten(replace: Callable[[Any, str, Any], None]) -> None:
    """Replace the attributes that make commands wait. ``replace``: as ``setattr``."""
    replace(importlib.import_module("autopipe.commands.measuring"), "measure", _measure)


def _measure(*args: Any, **options: Any) -> Any:
    module = importlib.import_module("autopipe.measure.measure")
    with mock.patch.object(module, "MOST_WINDOWS", WINDOWS):
        return module.measure(*args, **options)
