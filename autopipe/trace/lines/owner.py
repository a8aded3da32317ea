"""Find the owner of a line in a call stack: the model, or a library that the model calls.

A library is an installed package, or the standard library. If the complete forward belongs to a library (a transformers
model), the package of the outermost frame counts as the model's own.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

_STANDARD = tuple({str(Path(sysconfig.get_paths()[name])) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))

STANDARD = "Python"


@functools.cache
def library_of(filename: str) -> str:
    """Return the installed package of a file, ``STANDARD`` for the standard library, or ""."""
    for marker in _INSTALLED:
        _, installed, tail = filename.rpartition(marker)
        if installed:
            return tail.partition(os.sep)[0]
    return STANDARD if filename.startswith(_STANDARD) else ""


def own_and_library(filenames: Sequence[str]) -> tuple[int, int | None]:
    """Return the index of the model's own frame, and of the innermost frame of a package that it calls.

    The model's own frame is the innermost one of the user's files or, if the model comes from a package, of the
    outermost package. The second index is None if the own frame calls nothing but the standard library.

    ``filenames``: those of the frames, innermost first; at least one.
    """
    return _positions(tuple(filenames))


@functools.lru_cache(maxsize=4096)
def _positions(filenames: tuple[str, ...]) -> tuple[int, int | None]:
    libraries = [library_of(filename) for filename in filenames]
    outermost = next((library for library in reversed(libraries) if library != STANDARD), STANDARD)
    home = "" if "" in libraries else outermost
    own = libraries.index(home)
    inner = next((index for index in range(own) if libraries[index] != STANDARD), None)
    return own, inner
