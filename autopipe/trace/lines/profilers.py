"""The profiler of the interpreter, which some parts of capture replace for a while."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def profiled_by(profile: Callable[..., Any] | None) -> Iterator[None]:
    """Replace the profiler; None: leave it. At the end, that of the caller is in place again, such as cProfile's."""
    before = sys.getprofile()
    if profile is not None:
        sys.setprofile(profile)
    try:
        yield
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        elif profile is not None:
            sys.setprofile(None)
            before.enable()  # it is not a function
