"""Find the files that the import of a TARGET would run, without running any of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from autopipe.workload.target.scripts import package_of
from autopipe.workload.target.targets import Target


def files_of(target: Target) -> tuple[Path, ...]:
    """Return the ``__init__.py`` files of the packages around a TARGET and its own file; () if it has no file.

    Symbolic links are resolved. Nothing is imported, not even a parent package.
    """
    if target.is_file:
        path = Path(target.location).expanduser().resolve()
        package = package_of(path)
        return (*(package.files if package is not None else ()), path)
    _search_here()
    files: list[Path] = []
    within: Sequence[str] | None = None
    parts = target.location.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:depth]), within)
        if spec is None:
            return ()
        if spec.origin is not None and spec.has_location:
            files.append(Path(spec.origin).resolve())
        if spec.submodule_search_locations is None and depth < len(parts):
            return ()
        within = list(spec.submodule_search_locations or ())
    return tuple(files)


def _search_here() -> None:
    """Make modules of the current folder importable, as ``import_target`` does."""
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _spec(name: str, within: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, within)
        if spec is not None:
            return spec
    return None
