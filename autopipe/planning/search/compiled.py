"""``compiled``: numba's njit if numba is installed (the ``fast`` extra), otherwise the plain function."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

HAVE_NUMBA = importlib.util.find_spec("numba") is not None and not os.environ.get("AUTOPIPE_NO_NUMBA")


def compiled(function: F) -> F:
    """Return the compiled function of numbers and arrays, cached on disk; without numba, the function itself."""
    if not HAVE_NUMBA:
        return function
    njit = importlib.import_module("numba").njit
    try:
        wrapped: F = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # there is no folder for the cache: compile in each process
        wrapped = njit(nogil=True)(function)
    return wrapped
