"""The modules that the user's files import, over several methods of ``Pipeline`` in one process.

A command of the command line is a process of its own. The methods of several pipelines share a process, where the
second model would get the ``utils`` of the first one, and an edited module would stay as it was first imported.

So the modules that a command has imported leave ``sys.modules`` at its end. The next command that loads the same files
gets them again, if none of their files has changed, and the script has not imported one of them since. Otherwise it
imports all of them again. Modules of libraries, compiled modules, and those that the script imported stay where they
are.
"""

from __future__ import annotations

import contextlib
import importlib
import linecache
import sys
import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

from autopipe.errors import RunError
from autopipe.users_code import is_own_file
from autopipe.workload.target.targets import is_target, watching

_LOCK = threading.RLock()


@dataclass(frozen=True, slots=True)
class _Imported:
    """What a command has imported."""

    modules: dict[str, ModuleType]
    stamps: dict[str, Hashable]  # of the files of the modules, as they were imported
    path: list[str]  # ``sys.path`` at the end of the command

    def is_current(self) -> bool:
        """Return whether there are modules, and an import would give the same ones."""
        same = all(_stamp(self.modules[name]) == stamp for name, stamp in self.stamps.items())
        return bool(self.modules) and same and sys.modules.keys().isdisjoint(self.modules)


class UserModules:
    """The modules of the commands of this process, and what the current command has loaded."""

    def __init__(self) -> None:
        self._imported: dict[Hashable, _Imported] = {}  # by the files that a command has loaded
        self._depth = 0  # of the current command
        self._key: Hashable = None  # of the current command
        self._targets: list[str] = []  # that the current command has loaded

    @contextlib.contextmanager
    def command(self, key: Hashable) -> Iterator[None]:
        """Run a command in the block. ``key``: equal for commands that load the same files.

        A command within a command, called by a callback, uses the modules that are there.

        Raises: RunError if another thread runs a command: a capture patches torch for the whole process; and for a
        command within a command that loads other files.
        """
        if not _LOCK.acquire(blocking=False):
            raise RunError(
                "another thread of this process runs a method of a Pipeline",
                remedy="call one method after the other, or use a process for each Pipeline",
            )
        self._depth += 1
        try:
            if self._depth > 1 and key != self._key:
                raise _nested()
            with contextlib.nullcontext() if self._depth > 1 else self._outermost(key):
                yield
        finally:
            self._depth -= 1
            _LOCK.release()

    @contextlib.contextmanager
    def _outermost(self, key: Hashable) -> Iterator[None]:
        start, script_modules, script_path = time.time_ns(), dict(sys.modules), list(sys.path)
        self._key, self._targets = key, []
        importlib.invalidate_caches()
        linecache.checkcache()  # a capture reads the text of the user's files

        def load(target: str) -> None:
            if not self._targets:
                imported = self._imported.get((key, target, *script_path))
                if imported is not None and imported.is_current():
                    _enter(imported.modules)
                    sys.path[:] = imported.path
            elif self._depth > 1 and target not in self._targets:
                raise _nested()
            self._targets.append(target)

        try:
            with watching(load):
                yield
        finally:
            imported = _taken_out(script_modules, start)
            if self._targets:
                self._imported[key, self._targets[0], *script_path] = imported
            sys.path[:] = script_path


USER_MODULES = UserModules()
"""Of this process."""


def _nested() -> RunError:
    return RunError(
        "a method of a Pipeline was called within another one, such as in its on_event, and loads other files",
        remedy="call it after the other method has returned, or in a process of its own",
    )


def _taken_out(script_modules: Mapping[str, ModuleType], start: int) -> _Imported:
    """Take the modules of a command out of ``sys.modules``. ``start``: of the command, in nanoseconds."""
    now = list(sys.modules.items())
    new = {name: module for name, module in now if script_modules.get(name) is not module and _is_users(name, module)}
    targets = {name for name, module in new.items() if is_target(module)}  # they run again when they are loaded
    for name in new:
        del sys.modules[name]
    for name, module in new.items():
        parent, _, last = name.rpartition(".")
        package = sys.modules.get(parent) or (new.get(parent) if name in targets else None)
        if package is not None and vars(package).get(last) is module:
            delattr(package, last)
    _enter({name: module for name, module in script_modules.items() if name not in sys.modules})
    modules = {name: module for name, module in new.items() if name not in targets}
    if any(_holds(module, targets) for module in modules.values()):
        modules = {}
    return _Imported(modules, {name: _stamp(module, start) for name, module in modules.items()}, list(sys.path))


def _enter(modules: Mapping[str, ModuleType]) -> None:
    """Put modules into ``sys.modules``, and into their packages."""
    sys.modules.update(modules)
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], last, module)


def _is_users(name: str, module: object) -> bool:
    """Return whether a module is Python text of the user: its outermost package is in no library."""
    outermost = sys.modules.get(name.partition(".")[0], module)
    if not isinstance(module, ModuleType) or not isinstance(outermost, ModuleType):
        return False
    places = [_file(outermost)] if _file(outermost) else list(vars(outermost).get("__path__", ()))
    return bool(places) and all(map(is_own_file, places)) and not _file(module).endswith(tuple(EXTENSION_SUFFIXES))


def _file(module: ModuleType) -> str:
    """Return the file of a module; "" for a package that is a folder without ``__init__.py``."""
    return str(vars(module).get("__file__") or "")


def _stamp(module: ModuleType, start: int | None = None) -> Hashable:
    """Return what changes with the file of a module. The text that ran is not known if it changed after ``start``."""
    path = Path(_file(module))
    if not path.is_file():
        return None
    status = path.stat()
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    return "unknown" if start is not None and changed >= start else (changed, status.st_size)


def _holds(module: ModuleType, others: set[str]) -> bool:
    """Return whether a variable of a module, or a container in one, has something that one of the others defines."""
    values = list(vars(module).values())
    values += [entry for value in values if type(value) in (list, tuple, set) for entry in value]
    values += [entry for value in values if type(value) is dict for entry in value.values()]
    return any(_definer(value) in others for value in values)


def _definer(value: Any) -> str:
    """Return the name of the module that defines a value; "" if it does not tell."""
    with contextlib.suppress(Exception):
        return str(value.__name__ if issubclass(type(value), ModuleType) else value.__module__)
    return ""
