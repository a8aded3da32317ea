"""The modules that the user's files import, over several commands of one process.

A command of the command line is a process of its own, so it imports the user's files and the modules that they import.
The methods of several ``Pipeline`` objects share a process. Without care, the second model would silently get the
``utils`` of the first one, and an edited module would stay as it was first imported, while the ranks import it new.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from autopipe.errors import RunError
from autopipe.workload.target.targets import is_installed

Version = tuple[int, int]  # time of the last change in nanoseconds, size in bytes


@dataclass(slots=True)
class UserImports:
    """What the commands of this process have imported from the user's files."""

    key: Hashable = None  # of the last command
    versions: dict[str, tuple[ModuleType, Version]] = field(default_factory=dict)  # by the name of the module
    folders: list[str] = field(default_factory=list)  # entries that the commands added to ``sys.path``
    _depth: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @contextlib.contextmanager
    def command(self, key: Hashable) -> Iterator[None]:
        """Run a command in the block, as if it were a process of its own.

        ``key``: equal for commands that load the same files. Modules that earlier commands imported are imported again
        if the key differs, or if a file of theirs has changed since. A command within a command, called by a callback,
        uses the modules that are there. Modules that the process has imported itself are never touched.

        Raises: RunError if another thread runs a command: a capture patches torch for the whole process.
        """
        if not self._lock.acquire(blocking=False):
            raise RunError(
                "another thread of this process runs a method of a Pipeline",
                remedy="call one method after the other, or use a process for each Pipeline",
            )
        try:
            if not self._depth and (key != self.key or any(map(self._changed, self.versions))):
                self._forget()
            self.key = self.key if self._depth else key
            present, folders = set(sys.modules), list(sys.path)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                self._remember(present, folders)
        finally:
            self._lock.release()

    def _remember(self, present: set[str], folders: list[str]) -> None:
        for name in set(sys.modules) - present:
            module = sys.modules[name]
            if not name.startswith("autopipe.") and _is_users(module):
                self.versions[name] = module, _version(module)
        self.folders += [folder for folder in sys.path if folder not in folders]

    def _changed(self, name: str) -> bool:
        module, version = self.versions[name]
        return _version(module) != version

    def _forget(self) -> None:
        for name, (module, _) in self.versions.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        for folder in self.folders:
            with contextlib.suppress(ValueError):  # the user's code removed it
                sys.path.remove(folder)
        self.versions.clear()
        self.folders.clear()
        importlib.invalidate_caches()


USER_IMPORTS = UserImports()
"""Of this process."""


def _is_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is not None:
        return not is_installed(file)
    parts = [*getattr(module, "__path__", ())]  # a folder without __init__.py has no file
    return bool(parts) and not any({"site-packages", "dist-packages"} & set(Path(part).parts) for part in parts)


def _version(module: ModuleType) -> Version:
    """Return the version of a module's file, zeros if it has none or it is gone."""
    try:
        status = Path(str(getattr(module, "__file__", None))).stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
