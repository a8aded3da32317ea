"""Files of the second process: what it writes through ``open`` is kept in memory, and read from there.

Any other change (a new folder, a file that is deleted, another process) ends the comparison, by an audit hook, before
the script could notice that it was not made. ``kernel`` ends what Python does not see.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from autopipe.script.check.isolation import copy_into

_MOST_BYTES = 1 << 28  # of a file that is opened to be changed
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = {
    "os.chmod": "changes", "os.chown": "changes", "os.chflags": "changes", "os.link": "creates", "os.mkdir": "creates",
    "os.remove": "deletes", "os.removexattr": "changes", "os.rename": "renames", "os.rmdir": "deletes",
    "os.setxattr": "changes", "os.symlink": "creates", "os.utime": "changes", "shutil.rmtree": "deletes",
}  # fmt: skip
_LEAVES = {
    "builtins.input": "reads standard input", "os.exec": "starts a process", "os.fork": "starts a process",
    "os.forkpty": "starts a process", "os.posix_spawn": "starts a process", "os.spawn": "starts a process",
    "os.system": "starts a process", "subprocess.Popen": "starts a process", "pty.spawn": "starts a process",
    "socket.__new__": "uses the network", "os.kill": "signals a process", "os.killpg": "signals a process",
}  # fmt: skip


class PrivateFiles:
    """Files in memory by path.

    ``stop``: ends the process for a reason. ``opened``: the files that were open to be written when this process began:
    path -> descriptor, and whether its earlier content is missing.
    """

    def __init__(self, stop: Callable[[str], NoReturn], opened: dict[str, tuple[int, bool]]) -> None:
        self._stop = stop
        self._files = dict(opened)
        self._own = threading.local()  # its file is opened here

    def install(self) -> None:
        """Replace the functions of Python, and add the hook, for the rest of the process."""
        original: Any = io.open
        make_folder, link_status = os.mkdir, os.lstat

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            path = _path(file)
            if path is None or len(args) > 5 or kwargs.get("opener") is not None:
                return original(file, mode, *args, **kwargs)
            if path not in self._files:
                if not set(mode) & set("wax+"):
                    return original(file, mode, *args, **kwargs)
                self._begin(path, file, mode)
            elif "x" in mode:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), file)
            number, incomplete = self._files[path]
            if "w" in mode:
                os.ftruncate(number, 0)
                self._files[path] = number, False
            elif incomplete and ("r" in mode or "+" in mode):
                self._stop(f"reads {file}, which it has open for writing")
            if "a" in mode:
                fcntl.fcntl(number, fcntl.F_SETFL, os.O_APPEND)
            self._own.opens = True
            try:
                stream = original(file, mode, *args, opener=lambda *_: os.dup(number), **kwargs)
            finally:
                self._own.opens = False
            if "a" not in mode:
                stream.seek(0)
            return stream

        def create_folder(path: Any, *args: Any, **kwargs: Any) -> None:
            if not kwargs and os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            make_folder(path, *args, **kwargs)

        def known(function: Callable[..., Any], answer: Callable[[int], Any]) -> Callable[..., Any]:
            def asked(path: Any, *args: Any, **kwargs: Any) -> Any:
                if getattr(self._own, "asks", False):  # of the folders of a path
                    return function(path, *args, **kwargs)
                self._own.asks = True
                try:
                    private = self._files.get(_path(path) or "")
                finally:
                    self._own.asks = False
                return function(path, *args, **kwargs) if private is None else answer(private[0])

            return asked

        self._link_status = link_status
        builtins.open = io.open = opened
        os.mkdir, os.access = create_folder, known(os.access, lambda number: True)
        os.stat, os.lstat = known(os.stat, os.fstat), known(os.lstat, os.fstat)
        sys.addaudithook(self._seen)

    def _begin(self, path: str, file: Any, mode: str) -> None:
        """Put a file into memory that the script opens to write."""
        folder = Path(path).parent
        try:
            mode_of_file = Path(path).stat().st_mode
        except OSError:
            if "r" in mode:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file) from None
            if not os.access(folder, os.W_OK | os.X_OK):
                self._stop(f"writes {file}")
            self._files[path] = os.memfd_create("file"), False
            return
        if "x" in mode:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), file)
        if not (stat.S_ISREG(mode_of_file) or path == os.devnull) or not os.access(path, os.W_OK):
            self._stop(f"writes {file}")
        number = os.memfd_create("file")
        if stat.S_ISREG(mode_of_file) and "w" not in mode:
            if Path(path).stat().st_size > _MOST_BYTES:
                self._stop(f"changes {file}")
            old = os.open(path, os.O_RDONLY)
            copy_into(number, old)
            os.close(old)
        self._files[path] = number, False

    def _seen(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            writes = isinstance(flags, int) and flags & _WRITES and not getattr(self._own, "opens", False)
            if writes and isinstance(path, (str, bytes, os.PathLike)):
                self._stop(f"writes {os.fsdecode(path)}")
        elif event in _CHANGES:
            self._stop(f"{_CHANGES[event]} {_shown(args[0])}")
        elif event == "os.truncate" and not isinstance(args[0], int):
            self._stop(f"changes {_shown(args[0])}")
        elif event in _LEAVES:
            self._stop(_LEAVES[event])
        elif event == "sqlite3.connect" and args[0] != ":memory:":
            self._stop(f"writes {_shown(args[0])}")
        elif event in ("os.listdir", "os.scandir") and self._files:
            folder = _path(args[0] or ".")
            if any(Path(path).parent == Path(folder or "/") and self._is_new(path) for path in self._files):
                self._stop(f"lists {_shown(args[0])}, into which it has written")

    def _is_new(self, path: str) -> bool:
        try:
            self._link_status(path)
        except OSError:
            return True
        return False


def _shown(path: Any) -> str:
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else "a file"


def _path(file: Any) -> str | None:
    """Return the absolute path that a file argument means; None for a descriptor."""
    if isinstance(file, bool) or not isinstance(file, (str, bytes, os.PathLike)):
        return None
    path = Path(os.fsdecode(file))
    return str(Path(os.path.realpath(path.parent)) / path.name)
