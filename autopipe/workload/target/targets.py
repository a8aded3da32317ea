"""Import the user's module of a TARGET, and look up the object in it.

::

    TARGET := path/to/file.py[:ATTR] | package.module[:ATTR]

A file runs as under ``python file.py``, with its folder first on ``sys.path``, but its module is named after the stem
instead of ``__main__``. If the standard library or an installed package has a module of that name (``random.py``), or
the file itself imports one (``mingpt.py`` imports ``mingpt.model``), the module gets a private name, so that no import
resolves to the file by mistake. A file of a package that uses relative imports is imported under its full name, as by
``python -m``. Loading a file again runs it again.
"""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import importlib
import importlib.machinery
import importlib.util
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from autopipe.errors import AutopipeError, ModelFileError
from autopipe.ir.profile import WorkloadSpec
from autopipe.users_code import is_own_file_here
from autopipe.workload.target.guard import MAIN, refusing_training, run_command
from autopipe.workload.target.scripts import Package, imports_its_name, package_of

Watch = Callable[[str], None]
"""Receives the absolute path of a target that is a file, else the dotted name."""
_DEFINES_MODEL = re.compile(r"^(class \w+\(.*Module\)|def (build|get|create)_model\b|model\s*=)", re.MULTILINE)
_MARK = "__autopipe_loaded__"
_WATCHES: list[Watch] = []
_IMPORTING: contextvars.ContextVar[bool] = contextvars.ContextVar("_IMPORTING", default=False)


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed TARGET."""

    location: str  # a path or a dotted module name
    attribute: str  # may be dotted; "" if the TARGET names none

    @classmethod
    def parse(cls, text: str) -> Target:
        """Split a TARGET at its last colon.

        Raises: ModelFileError for an empty location.
        """
        location, colon, attribute = text.strip().rpartition(":")
        # a colon inside a path, as of a drive letter, does not begin an attribute
        if not colon or any(sign in attribute for sign in "/\\"):
            location, attribute = text.strip(), ""
        if not location:
            raise ModelFileError(
                f"{text!r} names neither a file nor a module",
                remedy="give path/to/file.py[:ATTR] or package.module[:ATTR]",
            )
        return cls(location, attribute)

    @property
    def is_file(self) -> bool:
        """Whether the location is a path rather than a dotted module name."""
        return self.location.endswith(".py") or any(sign in self.location for sign in "/\\")

    @property
    def label(self) -> str:
        """The human-readable location: the name of a file without its folder."""
        return Path(self.location).name if self.is_file else self.location


def elsewhere(text: str) -> Target | None:
    """Return the TARGET of a hook; None for ``:NAME``, which is in the file of the model."""
    return None if text.startswith(":") else Target.parse(text)


def absolute(text: str) -> str:
    """Return a TARGET that is independent of the current folder: a file gets its absolute path."""
    target = elsewhere(text)
    if target is None or not target.is_file:
        return text
    path = str(Path(target.location).resolve())
    return f"{path}:{target.attribute}" if target.attribute else path


def in_full(spec: WorkloadSpec) -> WorkloadSpec:
    """Return a spec that is independent of the current folder."""
    hooks = {name: absolute(text) for name, text in spec.hooks.items()}
    return replace(spec, target=absolute(spec.target), hooks=hooks)


# that an error names
_MOST_FILES = 8


def import_target(target: Target) -> ModuleType:
    """Import the file or module of a TARGET.

    Raises: ModelFileError if it does not exist, or the user's code fails or trains; ``where`` is then the user's line.
    """
    for watch in _WATCHES:
        watch(absolute(target.location))
    token = _IMPORTING.set(True)
    try:
        with refusing_training():
            return _import_file(target.location) if target.is_file else _import_package(target.location)
    finally:
        _IMPORTING.reset(token)


def is_importing() -> bool:
    """Return whether the caller runs because ``import_target`` imports a target."""
    return _IMPORTING.get()


def is_target(module: ModuleType) -> bool:
    """Return whether ``import_target`` ran the file of the module, as it does each time."""
    return _MARK in vars(module)


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Call ``watch`` before each import of a target in the block, by any thread."""
    _WATCHES.append(watch)
    try:
        yield
    finally:
        _WATCHES.remove(watch)


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Runs a file from its text, without Python's cache of compiled files.

    That cache takes a file for unchanged if it has the same size and was last changed in the same second.
    """

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the module."""
        path = self.get_filename(fullname)
        linecache.cache.pop(path, None)  # tracebacks and ``inspect`` show this text
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def _import_file(location: str) -> ModuleType:
    path = Path(location).expanduser().resolve()
    if path.is_dir():
        raise _not_a_file(location)
    if not path.is_file():
        raise ModelFileError(f"file not found: {location}", where=str(path), remedy=nearby(path))
    package = package_of(path)
    if package is not None:
        return _import_member(package, path)
    if sys.path[:1] != [str(path.parent)]:
        sys.path.insert(0, str(path.parent))  # before installed packages, as Python does for a script
    name = _module_name(path)
    try:
        return _run(path, name, location)
    except ModelFileError as error:
        if name == _private(path) or not _shadowed_a_package(error.__cause__, path):
            raise
    return _run(path, _private(path), location)


def _import_member(package: Package, path: Path) -> ModuleType:
    """Import a file as the module of its package, as ``python -m`` does from the folder of the package."""
    if str(package.root) not in sys.path:
        sys.path.insert(0, str(package.root))
    sys.modules.pop(package.name, None)  # so that the file runs again
    importlib.invalidate_caches()
    with users_code(f"importing {path.name}", str(path)):
        module = importlib.import_module(package.name)
    setattr(module, _MARK, True)
    return module


def _run(path: Path, name: str, location: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelFileError(f"{location} is not a Python file", where=str(path), remedy="give a file that ends in .py")
    if type(spec.loader) is importlib.machinery.SourceFileLoader:
        spec.loader = _SourceLoader(name, str(path))
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


def nearby(path: Path) -> str:
    """Return what to try instead of a file that does not exist: the most similar name, and the files of its folder."""
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist either; check the path"
    files = sorted(entry.name for entry in path.parent.glob("*.py"))
    nearest = difflib.get_close_matches(path.name, files, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return f"{hint}Python files in that folder: {', '.join(files[:_MOST_FILES]) or 'none'}"


def _private(path: Path) -> str:
    return f"autopipe_model_{path.stem}"


def _shadowed_a_package(error: BaseException | None, path: Path) -> bool:
    """Return whether an import failed because the name of the file's module hides a package.

    Run as a script, the file would not have that name.
    """
    if isinstance(error, ImportError):
        if (error.name or "").partition(".")[0] != path.stem:
            return False
    elif not isinstance(error, AttributeError) or getattr(error.obj, "__file__", None) != str(path):
        return False
    spec = importlib.machinery.PathFinder.find_spec(path.stem)
    return spec is not None and spec.origin != str(path)


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
    with contextlib.suppress(Exception):  # the finder of an installed package may be broken
        if importlib.machinery.PathFinder.find_spec(path.stem, elsewhere) is not None:
            return private
    return path.stem


def _import_package(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as ``python -m`` does
    if not name.strip("."):  # the current folder or one above
        raise _not_a_file(name)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:  # a parent package that is missing or fails
        missing = isinstance(error, ModuleNotFoundError) and error.name and name.startswith(error.name)
        if not missing:
            raise _wrap(f"importing {name}", "", error) from error
        spec = None
    if (spec is None or spec.origin is None) and Path(name).exists():
        raise _not_a_file(name)
    if spec is None:
        parent, _, last = name.rpartition(".")
        hints = [f"{name}.py"] if Path(f"{name}.py").is_file() else []
        hints += difflib.get_close_matches(name, [path.name for path in Path().glob("*.py")], n=1, cutoff=0.8)
        if not hints and parent and parent in sys.modules:
            hints = [f"{parent}:{last}"]
        remedy = f"did you mean {' or '.join(hints)}?" if hints else "give path/to/file.py, or an installed module"
        raise ModelFileError(f"module not found: {name!r}", remedy=remedy)
    with users_code(f"importing {name}", spec.origin or ""):
        return importlib.import_module(name)


def _not_a_file(location: str) -> ModelFileError:
    """Return the error for a folder, with its files that define a model, and for a file of another kind."""
    files = [path for path in sorted(Path(location).expanduser().glob("*.py")) if path.is_file()]
    models = []
    for path in files:
        with contextlib.suppress(OSError):  # it may not be readable
            if _DEFINES_MODEL.search(path.read_text(encoding="utf-8", errors="replace")):
                models.append(path)
    kind = "is a folder, not a Python file" if Path(location).expanduser().is_dir() else "is not a Python file"
    named = [str(path) for path in (models or files)[:_MOST_FILES]]
    what = "its files that define a model" if models else "its files"
    return ModelFileError(
        f"{location} {kind}",
        where=str(Path(location).expanduser().resolve()),
        remedy=f"name one of {what}: {', '.join(named)}" if named else "give a file that ends in .py",
    )


def look_up(module: ModuleType, attribute: str, label: str) -> Any:
    """Return an attribute of the user's module, which may be dotted.

    Raises: ModelFileError naming the attribute and the public names of the module.
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
    """Turn exceptions of the user's code into a ModelFileError whose ``where`` is the user's line that failed.

    Meanwhile ``sys.argv`` is that of ``python file.py``: a script that parses its arguments gets its own defaults, not
    the arguments of autopipe.
    """
    arguments = sys.argv
    sys.argv = [path or arguments[0]]
    try:
        yield
    except AutopipeError:
        raise
    except (Exception, SystemExit) as error:
        raise _wrap(doing, path, error) from error
    finally:
        sys.argv = arguments


@contextlib.contextmanager
def advising(remedy: str) -> Iterator[None]:
    """Replace the remedy of errors of the user's code whose cause is an option of the command line."""
    try:
        yield
    except ModelFileError as error:
        raise ModelFileError(error.what, where=error.where, remedy=remedy) from error.__cause__


def _wrap(doing: str, path: str, error: BaseException) -> ModelFileError:
    what = f"{doing} failed: {type(error).__name__}: {error}"
    remedy = "correct that line; python on the file alone shows the same error"
    if isinstance(error, SystemExit):
        what, remedy = f"{doing} ended the program (sys.exit)", f"put that part under {MAIN}"
        frames = traceback.extract_tb(error.__traceback__)
        scripts = [frame.filename for frame in frames if frame.name == "<module>" and is_own_file_here(frame.filename)]
        if scripts:
            remedy = f"{run_command(scripts[-1])} runs the script as it is; or {remedy}"
    elif isinstance(error, ImportError) and "attempted relative import" in str(error):
        folder = Path(path).parent
        named = f"{folder.name}.{Path(path).stem}, from the folder {folder.parent}" if path else "package.module:ATTR"
        remedy = f"the file is part of a package: name it as {named}"
    elif isinstance(error, ModuleNotFoundError) and error.name is not None and " " not in error.name:
        remedy = f"install {error.name}, or correct the import"
    return ModelFileError(what, where=user_line(error, path), remedy=remedy)


def user_line(error: BaseException, path: str) -> str:
    """Return ``file:line in function: text`` of the frame that failed, else ``path``.

    That is the last frame in ``path``, else the last frame outside of autopipe and of installed packages.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if path and frame.filename == path]
    others = [frame for frame in frames if is_own_file_here(frame.filename)]
    if not own and not others:
        return path
    frame = (own or others)[-1]
    text = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno} in {frame.name}: {text}"
