"""Files and folders that forward or loss read and change: state that no snapshot contains."""

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
from autopipe.trace.state.trying.isolation import replaced

_READ, _NEW, _CHANGED = "read", "new", "changed"
_ASKING = frozenset(("exists", "lexists", "isfile", "isdir", "islink", "is_file", "is_dir"))
"""Functions that ask whether a file exists: before its heading is written, or a cache is filled."""
_FRAMES = 4  # from ``os.stat`` to the function that asks
_OPEN, _OPEN_DESCRIPTOR = open, os.open


class Files:
    """The accesses of one run to files and folders, in their order."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[str]] = {}
        self._writers: dict[str, str] = {}  # path -> the first line that changes it

    def carried(self) -> dict[str, str]:
        """Return what the run reads as an earlier run left it, and changes: path -> the line that changes it."""
        return {path: self._writers[path] for path, kinds in self._kinds.items() if _is_carried(kinds)}

    def note(self, path: Any, kinds: Iterable[str], *, entry: bool = False) -> None:
        """Note accesses to a path. ``entry``: its folder gains or loses it. Descriptors are ignored."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        whole = Path(os.path.realpath(os.fsdecode(path)))  # ``Path.resolve`` calls ``os.stat``
        for one, added in ((str(whole), list(kinds)), (str(whole.parent), [_CHANGED] if entry else [])):
            self._kinds.setdefault(one, []).extend(added)
            if set(added) - {_READ}:
                self._writers.setdefault(one, here())

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
        access = flags & os.O_ACCMODE
        kinds = [_NEW] if flags & os.O_TRUNC else [_CHANGED] if access != os.O_RDONLY else []
        self.note(path, kinds if access == os.O_WRONLY or kinds == [_NEW] else [_READ, *kinds], entry=not is_there)
        return descriptor


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
