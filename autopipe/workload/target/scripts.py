"""Decide from the text of a file whether to import it as a script or as a module of a package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_INIT = "__init__.py"


@dataclass(frozen=True, slots=True)
class Package:
    """The position of a file in a package."""

    root: Path  # the folder that contains the outermost package
    name: str  # of the module, dotted
    files: tuple[Path, ...]  # the ``__init__.py`` of each package, the outermost first


def package_of(path: Path) -> Package | None:
    """Return the package of a file that uses relative imports; None for any other file.

    Run as a script, such a file fails at its first relative import; ``python -m`` runs it under its full name.
    """
    if not path.stem.isidentifier() or not (path.parent / _INIT).is_file():
        return None
    if not any(isinstance(node, ast.ImportFrom) and node.level for node in _imports(path)):
        return None
    folders = []
    folder = path.parent
    while (folder / _INIT).is_file() and folder.name.isidentifier():
        folders.append(folder)
        folder = folder.parent
    folders.reverse()
    parts = [*(package.name for package in folders), *([] if path.name == _INIT else [path.stem])]
    return Package(folder, ".".join(parts), tuple(package / _INIT for package in folders)) if folders else None


def imports_its_name(path: Path) -> bool:
    """Return whether a file imports a module or package of its own name: ``mingpt.py`` imports ``mingpt.model``."""
    return any(name.partition(".")[0] == path.stem for node in _imports(path) for name in _absolute(node))


def _imports(path: Path) -> Iterator[ast.Import | ast.ImportFrom]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # running the file reports the error
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node


def _absolute(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if node.module and not node.level else []
