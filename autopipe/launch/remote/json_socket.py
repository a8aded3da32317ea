"""JSON lines over a socket: what the processes of a cluster's launcher say to rank 0's, and it to them.

The other end is noticed to be gone at once when its process ends, and within ten seconds when its host does: the
kernel's own probes see to that, so that nobody need be awake for it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping
from multiprocessing.connection import wait
from typing import Any

SEND_SECONDS = 10.0
LARGEST_LINE_BYTES = 16 * 2**20
_CHUNK_BYTES = 65536
# the kernel's probes of a silent peer: after 4 s every 2 s, given up after three
_PROBES = (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000))


class WireError(Exception):
    """The other end is gone, or says what is no line of ours. The text says which."""


class Wire:
    """One connection. ``receive`` only when it is ready: it can be waited for like a socket."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(SEND_SECONDS)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _PROBES:
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket = connected
        self._rest = b""

    def fileno(self) -> int:
        """Return the descriptor, so that the connection can be waited for; -1 once closed."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message. Raises: WireError where it cannot be sent within ten seconds."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise WireError(f"the connection broke: {error.strerror or error}") from None

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived whole, maybe none.

        Raises: WireError at the end of the connection, and for what is no message.
        """
        try:
            chunk = self._socket.recv(_CHUNK_BYTES)
        except TimeoutError:
            return []
        except OSError as error:
            raise WireError(f"the connection broke: {error.strerror or error}") from None
        if not chunk:
            raise WireError("the connection was closed")
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LARGEST_LINE_BYTES:
            raise WireError("a message is larger than any of ours")
        return [_message(line) for line in lines]

    def hold(self) -> None:
        """Say nothing more, and leave the connection open for as long as this process lives."""
        self._socket.detach()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def ready_of(things: Iterable[Any], timeout: float) -> set[Any]:
    """Return those of some connections and processes that have something to say within ``timeout`` seconds."""
    return set(wait(things, timeout))


def _message(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise WireError("what arrived is no message of ours") from None
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        raise WireError("what arrived is no message of ours")
    return found
