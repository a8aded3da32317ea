"""``compiled``: numba's njit where numba is installed (the ``fast`` extra), else the plain function, slower."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

HAVE_NUMBA = importlib.util.find_spec("numba") is not None and not os.environ.get("AUTOPIPE_NO_NUMBA")


def compiled(function: F) -> F:
    """Compile a function of numbers and arrays, kept on disk between runs; without numba return it as it is."""
    if not HAVE_NUMBA:
        return function
    njit = importlib.import_module("numba").njit
    try:
        wrapped: F = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder to keep the compiled code in: compile again in each process
        wrapped = njit(nogil=True)(function)
    return wrapped
