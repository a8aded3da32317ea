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
import time
from collections.abc import Iterator
from pathlib import Path

from autopipe.errors import RunError

# some network file systems have no locks: then no command is refused
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
# longer than a shared lock of ``holder``
_LOOK_SECONDS = 0.05


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
            process = {"pid": os.getpid(), "host": socket.gethostname(), "doing": activity}
            os.pwrite(descriptor, json.dumps(process).encode() + b"\n", 0)
        yield
    finally:
        os.close(descriptor)


def holder(directory: Path) -> dict[str, object] | None:
    """Return the process that holds ``directory/lock``, as its file describes it; None if the lock is free.

    ``pid``, ``host`` and ``doing`` are its keys, {} if the file cannot be read. No command is refused meanwhile.

    Raises: OSError if that cannot be determined: the lock cannot be opened, or the file system has no locks.
    """
    try:
        descriptor = os.open(directory / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, and released at once
    except BlockingIOError:
        return _described(descriptor)
    finally:
        os.close(descriptor)
    return None


def _take(descriptor: int, directory: Path, path: Path) -> None:
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_SECONDS)  # ``holder`` may have been looking
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


def _holder(descriptor: int) -> str:
    """Return a description of the process that holds a lock, from its file."""
    fields = _described(descriptor)
    if not fields:
        return "another process holds its lock"
    return f"process {fields['pid']} on {fields['host']} {fields['doing']} in it"


def _described(descriptor: int) -> dict[str, object]:
    try:
        fields = json.loads(os.pread(descriptor, 4096, 0))
        return {key: fields[key] for key in ("pid", "host", "doing")}
    except (OSError, ValueError, TypeError, KeyError):
        return {}
