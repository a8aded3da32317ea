"""Files, folders and descriptors that forward or loss read and change: state that no snapshot contains."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from autopipe.trace.explain import here
from autopipe.trace.state.isolation import replaced

_READ, _NEW, _CHANGED = "read", "new", "changed"
_ASKING = frozenset(("exists", "lexists", "isfile", "isdir", "islink", "is_file", "is_dir"))
"""Functions that ask whether a file exists: before its heading is written, or a cache is filled."""
_FRAMES = 4  # from ``os.stat`` to the function that asks
_OPEN, _OPEN_DESCRIPTOR, _OPEN_PIPE = open, os.open, os.pipe
POSITION = "the position of file descriptor "
_DESCRIPTORS = {
    **dict.fromkeys(("read", "readv"), ((_READ,), (_READ, _CHANGED))),
    **dict.fromkeys(("write", "writev"), ((_CHANGED,), (_CHANGED,))),
    **dict.fromkeys(("pread", "preadv", "fstat"), ((_READ,), ())),
    **dict.fromkeys(("pwrite", "pwritev"), ((_CHANGED,), ())),
    "ftruncate": ((_NEW,), ()),
}
"""Functions of ``os`` whose first argument is a descriptor: their accesses to the content and to the position."""


class Files:
    """The accesses of one run to files and folders, in their order."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[str]] = {}
        self._writers: dict[str, str] = {}  # path -> the first line that changes it
        self._opened: set[int] = set()  # descriptors that the run opened itself

    def carried(self) -> dict[str, str]:
        """Return what the run reads as an earlier run left it, and changes: its name -> the line that changes it."""
        return {_name(path): self._writers[path] for path, kinds in self._kinds.items() if _is_carried(kinds)}

    def note(self, path: Any, kinds: Iterable[str], *, entry: bool = False) -> None:
        """Note accesses to a path. ``entry``: its folder gains or loses it. Descriptors are ignored."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        whole = Path(os.path.realpath(os.fsdecode(path)))  # ``Path.resolve`` calls ``os.stat``
        self._add(str(whole), kinds)
        self._add(str(whole.parent), [_CHANGED] if entry else [])

    def _add(self, path: str, kinds: Iterable[str]) -> None:
        added = list(kinds)
        self._kinds.setdefault(path, []).extend(added)
        if set(added) - {_READ}:
            self._writers.setdefault(path, here())

    def note_descriptor(self, descriptor: Any, content: Iterable[str] = (), position: Iterable[str] = ()) -> None:
        """Note accesses to what is behind a descriptor, and to its position, unless the run opened it."""
        if type(descriptor) is int and descriptor not in self._opened:
            with contextlib.suppress(OSError):
                path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
                self._add(path, content)
                self._add(f"{POSITION}{descriptor} ({path})", position)

    def noting_descriptor(self, content: Iterable[str], position: Iterable[str]) -> Callable[..., None]:
        """Return a function that notes accesses to its first argument, a descriptor."""

        def note(descriptor: Any, *_: Any, **__: Any) -> None:
            self.note_descriptor(descriptor, content, position)

        return note

    def note_position(self, descriptor: Any, offset: int, whence: int, *_: Any) -> None:
        """Note a call of ``os.lseek``."""
        moved = [_READ, _CHANGED] if offset else [_READ]
        self.note_descriptor(descriptor, position=[_NEW] if whence == os.SEEK_SET else moved)

    def noting(self, kind: str, *, entry: bool = False) -> Callable[..., None]:
        """Return a function that notes accesses of a kind to its first argument."""

        def note(path: Any = ".", *_: Any, **__: Any) -> None:
            if not _only_asks():
                self.note(path, [kind], entry=entry)

        return note

    def note_renamed(self, old: Any, new: Any, *_: Any, **__: Any) -> None:
        """Note that a file or folder got another path."""
        self.note(old, [_CHANGED], entry=True)
        self.note(new, [_NEW], entry=True)

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file, as ``open`` does."""
        is_there = isinstance(file, int) or Path(os.fsdecode(file)).exists()
        stream = _OPEN(file, mode, *args, **kwargs)
        kinds = [_NEW] if set(mode) & set("wx") else [_CHANGED] if "a" in mode else [_READ]
        more = [_READ, _CHANGED] if "+" in mode and "w" not in mode else []
        self.note(file, kinds + more, entry=not is_there)
        return stream

    def open_descriptor(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        """Open a file, as ``os.open`` does."""
        is_there = Path(os.fsdecode(path)).exists()
        descriptor = _OPEN_DESCRIPTOR(path, flags, *args, **kwargs)
        self._opened.add(descriptor)
        access = flags & os.O_ACCMODE
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            return descriptor  # a file without a name, in the folder ``path``
        kinds = [_NEW] if flags & os.O_TRUNC or not is_there else [_CHANGED] if access != os.O_RDONLY else []
        self.note(path, kinds if access == os.O_WRONLY or kinds == [_NEW] else [_READ, *kinds], entry=not is_there)
        return descriptor

    def open_pipe(self) -> tuple[int, int]:
        """Open a pipe, as ``os.pipe`` does."""
        ends = _OPEN_PIPE()
        self._opened.update(ends)
        return ends


def _name(path: str) -> str:
    if path.startswith(POSITION):
        return path
    return f"the folder {path}" if Path(path).is_dir() else f"the file {path}"


def _is_carried(kinds: list[str]) -> bool:
    """Return whether the content that is read may be older than the run, and the run changes it."""
    new = kinds.index(_NEW) if _NEW in kinds else len(kinds)
    return _READ in kinds[:new] and any(kind != _READ for kind in kinds)


@contextlib.contextmanager
def watched_files() -> Iterator[Files]:
    """Note the files that a block opens in this thread, from Python and through ``torch.save``."""
    files = Files()
    with contextlib.ExitStack() as stack:
        for owner in (builtins, io):
            stack.enter_context(replaced(owner, "open", files.open))
        stack.enter_context(replaced(os, "open", files.open_descriptor))
        stack.enter_context(replaced(os, "pipe", files.open_pipe))
        for owner, name, note in _noted(files):
            stack.enter_context(replaced(owner, name, _after(getattr(owner, name), note)))
        yield files


def _noted(files: Files) -> Iterator[tuple[Any, str, Callable[..., object]]]:
    """Yield functions, with what is noted when they return: (module, name, function of the same arguments)."""
    yield torch, "save", lambda what, to, *_, **__: files.note(to, [_NEW])
    yield os, "stat", files.noting(_READ)
    yield os, "mkdir", files.noting(_NEW, entry=True)
    yield from ((os, name, files.noting(_READ)) for name in ("listdir", "scandir"))
    yield from ((os, name, files.noting(_CHANGED, entry=True)) for name in ("remove", "unlink", "rmdir"))
    yield os, "lseek", files.note_position
    for name, (content, position) in _DESCRIPTORS.items():
        yield os, name, files.noting_descriptor(content, position)
    yield from ((os, name, files.note_renamed) for name in ("rename", "replace"))


def _after(function: Callable[..., Any], note: Callable[..., object]) -> Callable[..., Any]:
    """Return a function that calls another, and then notes its arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        returned = function(*args, **kwargs)
        with contextlib.suppress(TypeError):  # arguments by other names
            note(*args, **kwargs)
        return returned

    return call


def _only_asks() -> bool:
    """Return whether ``os.stat`` is called to ask whether a file exists."""
    frame: Any = sys._getframe(1)
    for _ in range(_FRAMES):
        frame = frame.f_back if frame is not None else None
        if frame is not None and frame.f_code.co_name in _ASKING:
            return True
    return False


__all__ = ["Files", "watched_files"]
