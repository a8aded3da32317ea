"""One command at a time in a directory: a lock that the kernel takes back when its holder ends, however it ends.

Two runs in one directory would write each other's checkpoints; two commands that profile, plan or generate in one work
directory would exchange the files under each other: each file is written whole, but a plan, its record and its stage
files are several. So whoever comes second is refused, with the process that is there.
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

# a file system without locks (some network ones): nothing is held, and nothing is refused
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


@contextlib.contextmanager
def only_one(directory: Path, doing: str) -> Iterator[None]:
    """Hold ``directory/lock``. ``doing``: what this command does there, for whoever is refused.

    The file stays when the lock is given back: removing it could take another's lock away.

    Raises: RunError naming the process that holds it, or why the directory cannot be written.
    """
    path = directory / "lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if directory.is_symlink() and not directory.exists():
            raise RunError(
                f"{directory} is a link to {directory.readlink()}, which is not there",
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
        with contextlib.suppress(OSError):  # a full disk: the lock is held all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_this_process(doing)).encode() + b"\n", 0)
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


def _this_process(doing: str) -> dict[str, object]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "doing": doing}


def _holder(descriptor: int) -> str:
    """Say who holds a lock, as far as its file tells."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {found['pid']} on {found['host']} {found['doing']} there"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process works there"
