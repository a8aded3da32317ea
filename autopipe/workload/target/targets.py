"""TARGET text -> the user's module and the object in it.

::

    TARGET := path/to/file.py[:ATTR] | package.module[:ATTR]

A file is run as ``python file.py`` would run it, with its folder first on ``sys.path``, but under the name of its stem
instead of ``__main__``. A stem that the standard library or an installed package owns (``random.py``), or that the file
itself imports (``mingpt.py`` imports ``mingpt.model``), gets a private name instead, so that no import is answered with
the file. A file of a package that imports with leading dots is imported as ``python -m`` does, under its full name.
Loading a file again runs it again.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.machinery
import importlib.util
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from autopipe.errors import AutopipeError, ModelFileError
from autopipe.ir.profile import WorkloadSpec
from autopipe.workload.target.scripts import Package, imports_its_name, package_of

_MARK = "__autopipe_loaded__"


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed TARGET. ``attribute`` is "" where none is named; it may be dotted."""

    location: str
    attribute: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """Cut a TARGET at its last colon.

        Raises: ModelFileError for an empty location.
        """
        location, colon, attribute = text.strip().rpartition(":")
        # a colon inside a path (a drive letter) is not the one before an attribute
        if not colon or any(sign in attribute for sign in "/\\"):
            location, attribute = text.strip(), ""
        if not location:
            raise ModelFileError(
                f"{text!r} names no file and no module",
                remedy="give path/to/file.py[:ATTR] or package.module[:ATTR]",
            )
        return cls(location, attribute)

    @property
    def is_file(self) -> bool:
        """Whether the location is a path rather than a dotted module name."""
        return self.location.endswith(".py") or any(sign in self.location for sign in "/\\")

    @property
    def label(self) -> str:
        """The location for people: a file's name without its folder."""
        return Path(self.location).name if self.is_file else self.location


def absolute(text: str) -> str:
    """Return a TARGET that means the same from any folder: a file by its absolute path, the rest as it is."""
    if text.startswith(":"):
        return text
    target = Target.parse(text)
    if not target.is_file:
        return text
    path = str(Path(target.location).resolve())
    return f"{path}:{target.attribute}" if target.attribute else path


def in_full(spec: WorkloadSpec) -> WorkloadSpec:
    """Return a spec that means the same from any folder."""
    hooks = {name: absolute(text) for name, text in spec.hooks.items()}
    return replace(spec, target=absolute(spec.target), hooks=hooks)


def import_target(target: Target) -> ModuleType:
    """Import what a TARGET points to.

    Raises: ModelFileError when it is not there, or when the user's own code fails; ``where`` is then their line.
    """
    return _import_file(target.location) if target.is_file else _import_package(target.location)


def _import_file(location: str) -> ModuleType:
    path = Path(location).expanduser().resolve()
    if path.is_dir():
        raise ModelFileError(f"{location} is a folder, not a Python file", where=str(path), remedy="name the .py file")
    if not path.is_file():
        raise ModelFileError(f"there is no file {location}", where=str(path), remedy=_nearby(path))
    package = package_of(path)
    if package is not None:
        return _import_member(package, path)
    if sys.path[:1] != [str(path.parent)]:
        sys.path.insert(0, str(path.parent))  # before installed packages, as python does
    name = _module_name(path)
    try:
        return _run(path, name, location)
    except ModelFileError as error:
        if name == _private(path) or not _meant_another(error.__cause__, path):
            raise
    return _run(path, _private(path), location)


def _import_member(package: Package, path: Path) -> ModuleType:
    """Import a file as the module of its package, as ``python -m`` does from the folder of the package."""
    if str(package.root) not in sys.path:
        sys.path.insert(0, str(package.root))
    sys.modules.pop(package.name, None)  # loaded again, it runs again
    importlib.invalidate_caches()
    with users_code(f"importing {path.name}", str(path)):
        return importlib.import_module(package.name)


def _run(path: Path, name: str, location: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelFileError(f"{location} is no Python file", where=str(path), remedy="give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    setattr(module, _MARK, True)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        with users_code(f"importing {path.name}", str(path)):
            spec.loader.exec_module(module)
    except ModelFileError:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    return module


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent} either; check the path"
    files = sorted(entry.name for entry in path.parent.glob("*.py"))
    nearest = difflib.get_close_matches(path.name, files, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return f"{hint}Python files in that folder: {', '.join(files[:8]) or 'none'}"


def _private(path: Path) -> str:
    return f"autopipe_model_{path.stem}"


def _meant_another(error: BaseException | None, path: Path) -> bool:
    """Whether an import failed because the file stands under a name that the import meant a package by.

    As a script, the file would not have had that name.
    """
    if isinstance(error, ImportError):
        if (error.name or "").partition(".")[0] != path.stem:
            return False
    elif not isinstance(error, AttributeError) or getattr(error.obj, "__file__", None) != str(path):
        return False
    found = importlib.machinery.PathFinder.find_spec(path.stem)
    return found is not None and found.origin != str(path)


def _module_name(path: Path) -> str:
    private = _private(path)
    if imports_its_name(path):
        return private
    present = sys.modules.get(path.stem)
    if present is not None:
        same = getattr(present, "__file__", None) == str(path)
        return path.stem if same or hasattr(present, _MARK) else private
    if path.stem in sys.stdlib_module_names:
        return private
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != path.parent]
    with contextlib.suppress(Exception):  # a broken finder of an installed package is not the user's problem
        if importlib.machinery.PathFinder.find_spec(path.stem, elsewhere) is not None:
            return private
    return path.stem


def _import_package(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as ``python -m`` does
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:  # a parent package that is missing or fails
        missing = isinstance(error, ModuleNotFoundError) and error.name and name.startswith(error.name)
        if not missing:
            raise _wrap(f"importing {name}", "", error) from error
        found = None
    if found is None:
        parent, _, last = name.rpartition(".")
        hints = [f"{name}.py"] if Path(f"{name}.py").is_file() else []
        hints += [f"{parent}:{last}"] if parent and parent in sys.modules else []
        remedy = f"did you mean {' or '.join(hints)}?" if hints else "give path/to/file.py, or an installed module"
        raise ModelFileError(f"there is no module {name!r}", remedy=remedy)
    with users_code(f"importing {name}", found.origin or ""):
        return importlib.import_module(name)


def look_up(module: ModuleType, attribute: str, label: str) -> Any:
    """Return an attribute, which may be dotted, of the user's module.

    Raises: ModelFileError naming the attribute and the public names that are there.
    """
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            names = [n for n in vars(module) if not n.startswith("_") and not isinstance(vars(module)[n], ModuleType)]
            raise ModelFileError(
                f"{label} has no {attribute!r}",
                where=getattr(module, "__file__", None) or module.__name__,
                remedy=f"names there: {', '.join(names[:20]) or 'none'}",
            )
        value = getattr(value, part)
    return value


@contextlib.contextmanager
def users_code(doing: str, path: str) -> Iterator[None]:
    """Turn what the user's code raises into a ModelFileError whose ``where`` is the line of theirs that failed.

    Meanwhile ``sys.argv`` is that of ``python file.py``: a script that parses its arguments gets its own defaults, and
    not the words that were meant for autopipe.
    """
    typed = sys.argv
    sys.argv = [path or typed[0]]
    try:
        yield
    except AutopipeError:
        raise
    except (Exception, SystemExit) as error:
        raise _wrap(doing, path, error) from error
    finally:
        sys.argv = typed


@contextlib.contextmanager
def advising(remedy: str) -> Iterator[None]:
    """Give what the user's code raises inside another remedy: the cause is what the command line said."""
    try:
        yield
    except ModelFileError as error:
        raise ModelFileError(error.what, where=error.where, remedy=remedy) from error.__cause__


def _wrap(doing: str, path: str, error: BaseException) -> ModelFileError:
    what = f"{doing} failed: {type(error).__name__}: {error}"
    remedy = "correct that line; python on the file alone shows the same error"
    if isinstance(error, SystemExit):
        what, remedy = f"{doing} ended the program (sys.exit)", 'put that part under `if __name__ == "__main__":`'
    elif isinstance(error, ImportError) and "attempted relative import" in str(error):
        folder = Path(path).parent
        named = f"{folder.name}.{Path(path).stem}, from the folder {folder.parent}" if path else "package.module:ATTR"
        remedy = f"the file is part of a package: name it as {named}"
    elif isinstance(error, ModuleNotFoundError) and error.name is not None and " " not in error.name:
        remedy = f"install {error.name}, or correct the import"
    return ModelFileError(what, where=user_line(error, path), remedy=remedy)


def user_line(error: BaseException, path: str) -> str:
    """Return ``file:line in function: text`` of the last frame in ``path``, else of the last that is neither ours nor
    an installed package's, else ``path``.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if path and frame.filename == path]
    others = [frame for frame in frames if not is_installed(frame.filename)]
    if not own and not others:
        return path
    frame = (own or others)[-1]
    text = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno} in {frame.name}: {text}"


def is_installed(filename: str) -> bool:
    """Whether a file is ours, an installed package's or the standard library's, or none at all."""
    paths = sysconfig.get_paths()
    folders = [Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    path = Path(filename)
    if not path.is_file() or {"site-packages", "dist-packages"} & set(path.parts):
        return True
    return any(path.is_relative_to(folder) for folder in (*folders, Path(__file__).parents[2]))
