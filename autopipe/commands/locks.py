"""A lock that admits one command at a time to a directory. The kernel releases it when the process ends.

Two runs in one directory would overwrite each other's checkpoints. Two commands that profile, plan or generate in one
work directory would mix their files: each file is written atomically, but a plan has a record and stage files too. So
the second command is refused, with the process that holds the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from autopipe.errors import RunError

# some network file systems have no locks: then no command is refused
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


@contextlib.contextmanager
def only_one(directory: Path, activity: str) -> Iterator[None]:
    """Hold ``directory/lock``. ``activity``: of this command, for the errors of commands that are refused meanwhile.

    The file remains when the lock is released: removing it could remove the lock of another process.

    Raises: RunError with the process that holds the lock, or the reason why the directory cannot be written.
    """
    path = directory / "lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if directory.is_symlink() and not directory.exists():
            raise RunError(
                f"{directory} is a link to {directory.readlink()}, which does not exist",
                where=str(directory),
                remedy="make that folder, remove the link, or choose another directory (--run-dir, --work-dir)",
            ) from None
        raise RunError(
            f"{directory} cannot be written: {error.strerror}",
            where=str(path),
            remedy="choose another directory (--run-dir, --work-dir), or make this one writable",
        ) from None
    try:
        _take(descriptor, directory, path)
        with contextlib.suppress(OSError):  # a full disk: the lock is valid nevertheless
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_this_process(activity)).encode() + b"\n", 0)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, directory: Path, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunError(
            f"{directory} is in use: {_holder(descriptor)}",
            where=str(path),
            remedy="wait until it has ended, end it, or choose another directory (--run-dir, --work-dir)",
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise RunError(f"{directory} cannot be locked: {error.strerror}", where=str(path)) from None


def _this_process(activity: str) -> dict[str, object]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "doing": activity}


def _holder(descriptor: int) -> str:
    """Return a description of the process that holds a lock, from its file."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']} {holder['doing']} in it"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process holds its lock"
