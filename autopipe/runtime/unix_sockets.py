"""Unix sockets between processes of one user: in folders of their own, and who is at the other end."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # process, user, group


def listening(path: Path) -> socket.socket:
    """Return a socket that listens at a path. Raises: OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as address:
            listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def connected(path: Path, timeout_seconds: float) -> socket.socket:
    """Return a socket that is connected to the one at a path, with a timeout. Raises: OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_seconds)
    try:
        with _short(path) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def other_process(connection: socket.socket) -> int:
    """Return the number of the process that has connected, or that listened. Raises: OSError."""
    return _credentials(connection)[0]


def is_same_user(connection: socket.socket) -> bool:
    """Return whether a process of this user is at the other end. Raises: OSError."""
    return _credentials(connection)[1] == os.getuid()


def _credentials(connection: socket.socket) -> tuple[int, int]:
    process, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return process, user


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a short path of a socket in its folder, which is open meanwhile: it has at most 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
