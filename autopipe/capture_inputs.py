"""What a capture was made from: if nothing of it has changed, a command uses the stored graph and captures nothing.

A capture is a function of the files that this process has read (the model file, every module that it imported, and any
other file that Python opened), of the environment, of the options, and of versions. The built model is compared, too:
its classes, attributes, parameters and buffers. A model whose code connects to something else, or changes a file that
it has read, is captured by every command.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import platform
import re
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopipe
from autopipe.ir import artifact
from autopipe.ir.profile import WorkloadSpec
from autopipe.users_code import AUTOPIPE, PYTHON, TORCH, is_model_file, is_own_file, library_of

_READING, _LISTING = "open", frozenset(("os.listdir", "os.scandir"))
_REACHING_OUT = frozenset(
    ("socket.connect", "subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.posix_spawn", "sqlite3.connect")
)
_IMPORT = "import"
_EVENTS = _LISTING | _REACHING_OUT | {_READING, _IMPORT}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_OF_THE_KERNEL = ("/proc/", "/sys/", "/dev/")
_IMPORTING = ("<frozen importlib", *importlib.__path__)
_LOADING = f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}"  # its workers make batches, whose shapes are compared
_SPAWNING = f"{os.sep}multiprocessing{os.sep}popen_"
_PACKAGES = ("site-packages", "dist-packages")
_BY_VERSION = (AUTOPIPE, PYTHON, TORCH)
_RENEW = "autopipe profile TARGET"
_MOST_FILES = 20_000
_CLOCK_NS = 20_000_000
"""By how much the clock of a file system may be behind."""
_OF_TERMINALS = re.compile(
    "_|COLORTERM|COLUMNS|LINES|OLDPWD|PWD|SHLVL|TERM|WINDOWID|(AUTOPIPE_)?NO_COLOR|CLICOLOR|FORCE_COLOR"
    "|(DBUS|GPG|SSH|TERM_PROGRAM|TERM_SESSION|TMUX|VSCODE|XDG_RUNTIME|XDG_SEAT|XDG_SESSION|XDG_VTNR).*"
    "|TORCHINDUCTOR_CACHE_DIR"  # a capture sets it
)
"""Variables of the environment that differ from shell to shell."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True, slots=True)
class CaptureInputs:
    """What the graph of a stored profile was captured from."""

    graph_digest: str
    options: str  # a digest
    # how the example was cut: the number of microbatches and the size of a minibatch, 0 where it was not known
    minibatch: tuple[int, int]
    surroundings: tuple[str, ...]  # versions, the host, the working directory, and a digest of the environment
    model: str  # the digest of the built model; see ``described``
    # path -> size, times of the last change, and inode; nothing for a path that did not exist
    files: dict[str, tuple[int, ...]]
    # what the batches and the capture decided; see ``WorkloadSpec``
    batch_dims: dict[str, int] | None
    opaque_modules: tuple[str, ...]
    team: int
    sequence: bool
    evaluation_note: str = ""
    notes: tuple[str, ...] = ()
    optimizer_note: str | None = None  # of the trial of its optimizer; None: it was not tried

    def changed(self) -> str:
        """Return what has changed since, of files and surroundings; "" if nothing has."""
        if surroundings() != self.surroundings:
            return "the environment, the working directory, the host or a version"
        return next((path for path, state in self.files.items() if _state(path) != state), "")

    def loading(self, given: WorkloadSpec) -> WorkloadSpec:
        """Return how to load the model, with what was decided. ``given``: as the options name it."""
        decided = replace(given, batch_dims=self.batch_dims, opaque_modules=self.opaque_modules)
        return replace(decided, team=self.team, sequence=self.sequence)


@dataclass(slots=True)
class _Accesses:
    """The files that the code of models opens, and the folders that it lists, from the first model of this process on.

    A command listens until its capture is made, or is not needed.
    """

    start: int = 0
    listens: bool = False
    read: set[str] = field(default_factory=set)
    recent: set[str] = field(default_factory=set)  # of ``read``, by the current command
    written: set[str] = field(default_factory=set)
    why_not: str = ""  # what cannot be compared
    variables: str = ""  # a digest of the environment, which the command itself changes later

    def begin(self) -> None:
        """Note accesses from now on, and the environment of now."""
        variables = [(name, value) for name, value in os.environ.items() if not _OF_TERMINALS.fullmatch(name)]
        self.recent, self.listens = set(), True
        self.variables = artifact.digest(sorted(variables))
        if not self.start:
            self.start = time.time_ns()
            sys.addaudithook(_audit)

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note an access, if the code of a model makes it."""
        frame = sys._getframe(2)
        caller = frame.f_code.co_filename
        if event == _IMPORT:
            if is_own_file(_importer(frame)):
                self.read |= _places(str(arguments[0]), arguments[2])
        elif event in _REACHING_OUT or _SPAWNING in caller:
            if not self.why_not and _is_of_model(frame):
                self.why_not = event
        elif event not in _LISTING:
            self._opened(frame, *arguments)
        elif not caller.startswith(_IMPORTING):
            self._opened(frame, arguments[0] if arguments[0] is not None else ".", "", 0)

    def _opened(self, frame: types.FrameType, path: Any, mode: str | None, flags: int) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # a descriptor, which was opened before
        name = os.fsdecode(path)
        if library_of(name) or not _is_of_model(frame):
            return
        if mode is None and not Path(name).is_absolute():  # by ``os.open``, in a folder that is not known
            self.why_not = self.why_not or "os.open"
        name = str(Path(name).absolute())
        if name.endswith(".pyc"):  # compiled from a file that is compared by Python itself
            with contextlib.suppress(ValueError):
                name = source_from_cache(name)
        if flags & _WRITING:
            self.written.add(name)
        if not flags & (os.O_WRONLY | os.O_TRUNC):
            self.read.add(name)
            self.recent.add(name)


_accesses = _Accesses()
begin = _accesses.begin


def _audit(event: str, arguments: tuple[Any, ...]) -> None:  # Python calls it hundreds of thousands of times
    if event in _EVENTS and _accesses.listens:
        _accesses.note(event, arguments)


@functools.cache
def versions() -> tuple[str, ...]:
    """Return the versions of autopipe, torch and Python, and a digest of autopipe's own source files."""
    source = hashlib.sha256()
    for path in sorted(Path(autopipe.__file__).parent.rglob("*.py")):
        source.update(path.read_bytes())
    return autopipe.__version__, source.hexdigest(), str(torch.__version__), platform.python_version()


def store(inputs: CaptureInputs | None, graph_digest: str, path: Path) -> None:
    """Write what a graph was captured from, if it was; remove the file if the graph is not to be used again."""
    _accesses.listens = False
    if inputs is None:
        return
    files = _files()
    if files is None:
        path.unlink(missing_ok=True)
    else:
        artifact.save(replace(inputs, graph_digest=graph_digest, files=files), path)


def optimizer_note(path: Path, trial: Callable[[], str], *, unchanged: bool) -> str:
    """Return the note of a trial of the optimizer, the stored one if the model is unchanged. Raises: as ``trial``."""
    inputs = artifact.load(CaptureInputs, path, renew=_RENEW) if path.is_file() else None
    if unchanged and inputs is not None and inputs.optimizer_note is not None:
        return inputs.optimizer_note
    note = trial()
    if inputs is not None:
        artifact.save(replace(inputs, optimizer_note=note), path)
    return note


def sources(path: Path) -> set[Path]:
    """Return the user's source files that a graph was captured from, also those that a forward imports."""
    inputs = artifact.load(CaptureInputs, path, renew=_RENEW) if path.is_file() else None
    files = () if inputs is None else inputs.files
    return {Path(file).resolve() for file in files if file.endswith(".py") and is_own_file(file)}


def newly_read(inputs: CaptureInputs) -> str:
    """Return a file of the user that this command has read or imported, and the capture did not; "" without one."""
    _accesses.listens = False
    paths = sorted(_counted(_accesses.recent) | _imported())
    return next((path for path in paths if path not in inputs.files and not library_of(path) and _state(path)), "")


def _files() -> dict[str, tuple[int, ...]] | None:
    """Return the state of every file that the model may depend on; None if that is not known."""
    paths = _counted(_accesses.read) | _imported() | {path for path in sys.path if path.endswith(_PACKAGES)}
    if _accesses.why_not or any(map(_state, paths & _accesses.written)):  # a temporary file is no longer there
        return None
    states = {path: _state(path) for path in sorted(paths)}
    # a file that changes meanwhile may not be what was read
    is_known = all(not state or max(state[1:3]) < _accesses.start - _CLOCK_NS for state in states.values())
    return states if is_known and len(states) <= _MOST_FILES else None


def _places(name: str, folders: Any) -> set[str]:
    """Return the source files that an import finds, or would find if they were there. ``folders``: ``sys.path``."""
    parent, _, last = name.rpartition(".")
    if parent:
        folders = getattr(sys.modules.get(parent), "__path__", None)
    names = (folder or "." for folder in folders or () if isinstance(folder, str) and not folder.endswith(_PACKAGES))
    own = [folder for folder in names if not library_of(f"{folder}{os.sep}")]
    places = [str(Path(folder, last).absolute()) for folder in own]
    return {place + end for place in places for end in (".py", f"{os.sep}__init__.py")}


def _counted(paths: set[str]) -> set[str]:
    # a copy: other threads open files
    return {path for path in paths.copy() if not path.startswith(_OF_THE_KERNEL) and not library_of(path)}


def _imported() -> set[str]:
    """Return the files of the imported modules, but of those whose versions count."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    named = {file: module.__name__ for module in modules if isinstance(file := vars(module).get("__file__"), str)}
    own = [file for file, name in named.items() if name.partition(".")[0] != AUTOPIPE]
    return {str(Path(file).absolute()) for file in own if library_of(file) not in _BY_VERSION}


def surroundings() -> tuple[str, ...]:
    """Return the versions, the host, the working directory, and a digest of the environment."""
    return (*versions(), platform.node(), str(Path.cwd()), _accesses.variables)


def described(model: nn.Module) -> str:
    """Return a digest of the classes, plain attributes, parameters and buffers of a model, without their values."""
    parts: list[Any] = []
    for path, module in model.named_modules():
        plain = [(name, value) for name, value in sorted(vars(module).items()) if _is_plain(value)]
        parts.append((path, type(module).__module__, type(module).__qualname__, plain))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):  # a tied one once
        parts.append((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _is_plain(value: Any) -> bool:
    parts = (*value, *value.values()) if isinstance(value, dict) else value
    return all(map(_is_plain, parts)) if isinstance(value, (tuple, list, dict)) else type(value) in _PLAIN


def _state(path: str) -> tuple[int, ...]:
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return ()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _importer(frame: types.FrameType | None) -> str:
    """Return the file whose code imports a module. ``frame``: the innermost one."""
    while frame is not None and frame.f_code.co_filename.startswith(_IMPORTING):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


def _is_of_model(frame: types.FrameType | None) -> bool:
    """Return whether the code of a model, or of a package that it uses, is running. ``frame``: the innermost one."""
    outermost = ""
    while frame is not None:
        outermost = frame.f_code.co_filename
        if _LOADING in outermost or library_of(outermost) == AUTOPIPE:
            return False
        if is_model_file(outermost):
            return True
        frame = frame.f_back
    return outermost == threading.__file__
