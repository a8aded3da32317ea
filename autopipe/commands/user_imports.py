"""The modules that the user's files import, over several commands of one process.

A command of the command line is a process of its own, so it imports the user's files and the modules that they import.
The methods of several ``Pipeline`` objects share a process. Without care, the second model would silently get the
``utils`` of the first one, and an edited module would stay as it was first imported, while the ranks import the edited
one.

What holds:

- A source module belongs to the commands if a command imported it first, by any finder or loader, and it is neither
  installed nor part of the standard library or of autopipe. This includes a library on ``PYTHONPATH`` and an editable
  install. An extension module belongs to them if its package does, or if it is in a user folder. User folders are those
  of the files named to the command, and those that the files put on ``sys.path``; of a TARGET that is a module of a
  library, only that package.
- Such a module is in ``sys.modules`` during commands only, and ``sys.path`` is the script's between commands. An import
  by the script thus never gets a module of a command, and commands do not remove a module that the script imported.
- The next command gets the same modules, so that they do not run twice, unless it loads other files, one of the files
  has changed, or the script has imported one of the modules or changed ``sys.path`` since. It then imports all of them
  again, except for extension modules, which cannot run twice: commands run each file of them once. Unchanged modules
  are no exception: they may hold what a module of the last command has set, which would silently change the model. An
  operator of a ``torch.library`` is registered again too; if something still holds the first one, this is an error.
- A module that the script imported is shared with the commands, and never imported again; a script can thus import a
  library that must not run twice. If a command runs a file that is also such a module, the module of the script is
  back after the command.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import os
import sys
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType

from autopipe.errors import RunError
from autopipe.users_code import is_own_file_here, library_of
from autopipe.workers.unguarded import refuse_unguarded
from autopipe.workload.target.sources import SourceLoader, folder_of
from autopipe.workload.target.targets import is_target, watching


@dataclass(slots=True)
class UserImports:
    """What the commands of this process have imported from the user's files."""

    key: Hashable = None  # of the last command
    modules: dict[str, ModuleType] = field(default_factory=dict)  # of the commands, in the order of their import
    path: list[str] = field(default_factory=list)  # ``sys.path`` at the end of the last command
    own_path: list[str] = field(default_factory=list)  # ``sys.path`` of the script
    folders: set[tuple[Path, str]] = field(default_factory=set)  # user folders, each with its one package or ""
    origins: dict[str, str | None] = field(default_factory=dict)  # by module: the file that ``PathFinder`` finds
    digests: dict[str, bytes] = field(default_factory=dict)  # by module: of the file, if its loader keeps no digest
    extensions: dict[tuple[str, str], ModuleType] = field(default_factory=dict)  # by name and file; of all commands
    names: set[str] = field(default_factory=set)  # of the modules that the current command uses or has imported
    _attributes: dict[str, object] = field(default_factory=dict)  # by module: what its package had under its name
    _forgot: bool = False  # whether modules were forgotten that may still be in memory
    _start: int = 0  # of the current command, in nanoseconds
    _loads: bool = False  # whether the current command has loaded a file
    _depth: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @contextlib.contextmanager
    def command(self, key: Hashable) -> Iterator[None]:
        """Run a command in the block, as if it were a process of its own.

        ``key``: equal for commands that load the same files. A command within a command, called by a callback, uses the
        modules that are there.

        Raises: RunError if another thread runs a command: a capture patches torch for the whole process; and for a
        command within a command that loads other files.
        """
        if not self._lock.acquire(blocking=False):
            raise RunError(
                "another thread of this process runs a method of a Pipeline",
                remedy="call one method after the other, or use a process for each Pipeline",
            )
        try:
            if self._depth and key != self.key:
                raise _nested()
            self._depth += 1
            try:
                with contextlib.nullcontext() if self._depth > 1 else self._outermost(key):
                    yield
            finally:
                self._depth -= 1
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _outermost(self, key: Hashable) -> Iterator[None]:
        own, own_path = dict(sys.modules), list(sys.path)
        self._start = time.time_ns()
        importlib.invalidate_caches()
        if key != self.key or own_path != self.own_path:
            self._forget()
        self.key, self.own_path, self._loads = key, own_path, False
        self._restore()
        finder = _Finder(self)
        position = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(position, finder)
        try:
            with watching(self._load):
                yield
        finally:
            with contextlib.suppress(ValueError):  # the user's code removed it
                sys.meta_path.remove(finder)
            self._keep(own)

    def includes(self, spec: ModuleSpec) -> bool:
        """Return whether a module that is about to be imported belongs to the commands."""
        if _is_installed(spec):
            return False
        if (spec.origin or "").endswith(".py") if spec.has_location else spec.submodule_search_locations:
            return True
        folder = folder_of(spec)
        added = {os.path.realpath(entry) for entry in sys.path if entry not in self.own_path}
        return (
            spec.name.rpartition(".")[0] in self.names
            or (folder is not None and str(folder) in added)
            or not self.folders.isdisjoint({(folder, ""), (folder, spec.name.partition(".")[0])})
        )

    def enter(self, name: str) -> None:
        """Note that the current command imports or uses a module of the commands."""
        self.names.add(name)
        package, last = _package(name), name.rpartition(".")[2]
        if package is not None:
            self._attributes.setdefault(name, vars(package).get(last, _MISSING))

    def _load(self, folder: Path, name: str) -> None:
        """Add a user folder, of a file that the current command is about to load."""
        if (folder, name) not in self.folders and self.folders:
            if self._depth > 1:
                raise _nested()
            if not self._loads:  # such as a run of another model: its files import modules of their own
                self._take_out(self.modules)
                sys.path[:] = self.own_path
                self._forget()
                self._collect()
        self._loads = True
        self.folders.add((folder, name))

    def _restore(self) -> None:
        """Give the current command the modules of the last one, if they would be the same after an import."""
        self.names.clear()
        self._attributes.clear()
        sys.path[:] = self.path or self.own_path
        if not self._are_current():
            sys.path[:] = self.own_path
            self._forget()
        self._collect()
        for name, module in self.modules.items():
            self.enter(name)
            sys.modules[name] = module
            if (package := _package(name)) is not None:
                setattr(package, name.rpartition(".")[2], module)

    def _are_current(self) -> bool:
        if not sys.modules.keys().isdisjoint(self.modules):
            return False
        for name, module in self.modules.items():
            loader = _loader(module)
            if not (loader.is_current() if isinstance(loader, SourceLoader) else self._is_unchanged(name, module)):
                return False
            if name in self.origins and self._origin(name) != self.origins[name]:
                return False
        return True

    def _is_unchanged(self, name: str, module: ModuleType) -> bool:
        return name not in self.digests or _digest(str(_file(module))) == self.digests[name] != b""

    def _origin(self, name: str) -> str | None:
        """Return the file that ``PathFinder`` finds for a module now."""
        parent, _, _ = name.rpartition(".")
        package = self.modules.get(parent) or sys.modules.get(parent)
        spec = PathFinder.find_spec(name, [*getattr(package, "__path__", ())] if parent else None)
        return None if spec is None else spec.origin

    def _keep(self, own: dict[str, ModuleType]) -> None:
        """Take the modules of the commands out of ``sys.modules``, and keep them for the next command."""
        modules = {
            name: module
            for name, module in sys.modules.items()
            if own.get(name) is not module and isinstance(module, ModuleType) and self._is_of_commands(name, module)
        }
        for module in modules.values():
            if isinstance(loader := _loader(module), ExtensionFileLoader):
                self.extensions[loader.name, loader.path] = module
        for name, module in modules.items():
            if _is_source(module) and not isinstance(_loader(module), SourceLoader):
                # its text is not known if the file has changed since the command began
                self.digests.setdefault(name, _digest(str(_file(module)), before=self._start))
            if vars(module).get("__spec__") is not None and name not in self.origins:
                self.origins[name] = self._origin(name)
        # the file of a target runs again at each command
        ran = {name for name, module in modules.items() if name in own or is_target(module)}
        self._take_out(modules)
        for name in own.keys() - sys.modules.keys():
            sys.modules[name] = own[name]
        self.modules = {name: module for name, module in modules.items() if name not in ran}
        self.path = list(sys.path)
        sys.path[:] = self.own_path
        if any(_refers(name, module, ran) for name, module in self.modules.items()):
            self._forget()

    def _take_out(self, modules: Mapping[str, ModuleType]) -> None:
        """Remove modules from ``sys.modules``, and from the packages that stay."""
        for name, module in modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        for name, value in self._attributes.items():
            package, last = _package(name), name.rpartition(".")[2]
            if package is not None and value is not _MISSING:
                setattr(package, last, value)
            elif package is not None and isinstance(vars(package).get(last), ModuleType):
                delattr(package, last)
        self._attributes.clear()
        self.names.clear()

    def _is_of_commands(self, name: str, module: ModuleType) -> bool:
        spec = vars(module).get("__spec__")
        package, _, _ = name.rpartition(".")
        if _is_source(module) and (spec is not None or not package or package in self.names):
            return True
        if spec is None:  # created by a package, as a submodule of itself
            parts = name.split(".")
            return any(".".join(parts[:count]) in self.names for count in range(1, len(parts)))
        return name in self.names or is_target(module) or spec.name in self.names

    def _collect(self) -> None:
        """Free forgotten modules, and with them what they registered, such as operators of a ``torch.library``."""
        if self._forgot:
            gc.collect()
        self._forgot = False

    def _forget(self) -> None:
        self._forgot = self._forgot or bool(self.modules)
        self.modules.clear()
        self.path.clear()
        self.folders.clear()
        self.origins.clear()
        self.digests.clear()


class _Finder:
    """Finds the modules of the commands, by ``PathFinder`` and the finders after it, which find all others."""

    def __init__(self, imports: UserImports) -> None:
        self.imports = imports

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        origin = None if spec is None else spec.origin
        if spec is None:
            spec = self._find_later(name, path, target)
        if spec is None or not self.imports.includes(spec):
            return None
        self.imports.enter(name)
        self.imports.origins[name] = origin
        if type(spec.loader) is SourceFileLoader:
            spec.loader = SourceLoader(name, spec.loader.path)
        elif isinstance(spec.loader, ExtensionFileLoader):
            module = self.imports.extensions.get((name, spec.loader.path))
            if module is not None:
                spec.loader = _Again(name, spec.loader.path, module)
        return spec

    def _find_later(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """Return what the finders after ``PathFinder`` find, such as that of an editable install."""
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else ():
            find = getattr(finder, "find_spec", None)
            spec = None if find is None or finder is PathFinder else find(name, path, target)
            if isinstance(spec, ModuleSpec):
                return spec
        return None


class _Again(ExtensionFileLoader):
    """Returns an extension module that an earlier command has imported, as it is."""

    def __init__(self, name: str, path: str, module: ModuleType) -> None:
        super().__init__(name, path)
        self.module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: an earlier import has executed the module."""


_MISSING = object()
USER_IMPORTS = UserImports()
"""Of this process."""


def _nested() -> RunError:
    return RunError(
        "a method of a Pipeline was called within another one, such as in its on_event, and loads other files",
        remedy="call it after the other method has returned, or in a process of its own",
    )


def _package(name: str) -> ModuleType | None:
    """Return the package of a submodule, if it is imported."""
    package = sys.modules.get(name.rpartition(".")[0])
    return package if isinstance(package, ModuleType) else None


def _loader(module: ModuleType) -> object:
    return getattr(vars(module).get("__spec__"), "loader", None)


def _file(module: ModuleType) -> object:
    return vars(module).get("__file__")


def _is_source(module: ModuleType) -> bool:
    file = _file(module)
    return isinstance(file, str) and file.endswith(".py") and is_own_file_here(file)


def _digest(file: str, before: int | None = None) -> bytes:
    """Return the digest of a file; empty if it is gone, or was not last changed before a time in nanoseconds."""
    try:
        if before is not None and Path(file).stat().st_ctime_ns >= before:
            return b""
        return hashlib.sha256(Path(file).read_bytes()).digest()
    except OSError:
        return b""


def _is_installed(spec: ModuleSpec) -> bool:
    if spec.has_location:
        return not is_own_file_here(spec.origin or "")
    return any(map(library_of, spec.submodule_search_locations or ()))  # of a namespace package


def _refers(name: str, module: ModuleType, others: set[str]) -> bool:
    """Return whether a module is in one of the packages ``others``, or holds what one of the modules defines."""
    packages = {name[:position] for position, sign in enumerate(name) if sign == "."}
    values = list(vars(module).values())
    modules = {value.__name__ for value in values if isinstance(value, ModuleType)}
    definers = {str(value.__module__) for value in values if isinstance(value, (FunctionType, type))}
    kinds = {str(type(value).__module__) for value in values}
    return not others.isdisjoint(packages | modules | definers | kinds)


__all__ = ["USER_IMPORTS", "UserImports", "refuse_unguarded"]
