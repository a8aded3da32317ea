"""The owner of a piece of code: the user, an installed package, Python, torch or autopipe.

The name of a file decides. A file below ``site-packages`` or ``dist-packages`` is an installed package's, also if it
defines the TARGET. A package that is installed with ``pip install -e`` lies elsewhere, so its files are the user's own.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

AUTOPIPE, TORCH, PYTHON = "autopipe", "torch", "Python"

_NO_MODELS = frozenset((AUTOPIPE, TORCH, PYTHON))
_NO_MODEL_MODULES = frozenset(("torch", "numpy", "autopipe", "builtins", *sys.stdlib_module_names))
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Folders of installed packages in any place: of the system, of the user's account or on ``PYTHONPATH``."""


@functools.cache
def library_of(filename: str) -> str:
    """Return the library of a file: ``AUTOPIPE``, ``TORCH``, ``PYTHON``, the name of another installed package, or "".

    ``PYTHON`` is the standard library. "" is a file of the user, or text without a file, such as ``<string>``.
    """
    for name, folders in _folders().items():
        if name != PYTHON and filename.startswith(folders):
            return name
    package = path_in_packages(filename).partition(os.sep)[0]
    return package or (PYTHON if filename.startswith((*_folders()[PYTHON], "<frozen ")) else "")


def path_in_packages(filename: str) -> str:
    """Return the path of a file relative to the folder of installed packages, or "" for a file elsewhere."""
    for marker in _INSTALLED:
        _, installed, tail = filename.rpartition(marker)
        if installed:
            return tail
    return ""


@functools.cache
def _folders() -> dict[str, tuple[str, ...]]:
    """Return the folders of each library that is known by its place. A folder may be a link."""
    # no other finder: one may ask for the owner of what it finds
    spec = None if TORCH in sys.modules else PathFinder.find_spec(TORCH)
    torch = importlib.import_module(TORCH).__file__ if spec is None else spec.origin
    folders = {
        AUTOPIPE: [str(Path(__file__).parent)],
        TORCH: [str(Path(torch).parent)] if torch else [],
        PYTHON: [str(Path(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib")],
    }
    return {
        name: tuple({folder + os.sep for path in paths for folder in (path, os.path.realpath(path))})
        for name, paths in folders.items()
    }


@functools.cache
def is_package(filename: str) -> bool:
    """Return whether a file belongs to an installed package, including torch and autopipe."""
    return library_of(filename) not in ("", PYTHON)


@functools.cache
def is_own_file(filename: str) -> bool:
    """Return whether the user wrote a file: it belongs to no library. Text without a file does not count."""
    return not filename.startswith("<") and filename != "" and not library_of(filename)


def is_own_file_here(filename: str) -> bool:
    """Return the same for a file that must exist here.

    The frame of an extension that Cython compiled names a source file that was not installed.
    """
    return is_own_file(filename) and Path(filename).is_file()


def is_own_module(module: Any) -> bool:
    """Return whether the user wrote the file of a module. A script may register any object as a module."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_own_file(file)


def is_own_class(kind: type) -> bool:
    """Return whether the user wrote the file of a class."""
    return is_own_module(sys.modules.get(str(kind.__module__)))


@functools.cache
def is_model_code(filename: str) -> bool:
    """Return whether code may be a model's: the user's or an installed package's, but not torch's.

    Text without a file counts, such as the code of a graph module of torch: its lines are in tracebacks.
    """
    return library_of(filename) not in _NO_MODELS


def is_model_file(filename: str) -> bool:
    """Return the same for code in a file, whose text can be read: that of a dataclass's methods cannot."""
    return not filename.startswith("<") and is_model_code(filename)


@functools.cache
def is_model_module(name: str) -> bool:
    """Return whether a module of this name may be a model's: not torch's, numpy's, autopipe's or Python's.

    The name decides for an object whose class has no file, too. numpy's objects are values and not parts of a model.
    """
    return name.partition(".")[0] not in _NO_MODEL_MODULES
