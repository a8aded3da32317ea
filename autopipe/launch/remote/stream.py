"""Messages as lines over a socket, or stdin and stdout. Reading never blocks; sending blocks for a time."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterable
from multiprocessing.connection import wait
from typing import Any, Protocol

from autopipe.launch.remote.protocol import Message, decode, encode

SEND_SECONDS = 10.0
LARGEST_LINE_BYTES = 16 * 2**20
_CHUNK_BYTES = 65536
# the kernel's probes of a silent peer: after 4 s, every 2 s, at most three. A dead host is detected within ten seconds
_PROBES = (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000))


class StreamError(Exception):
    """The other end has closed the stream, does not read, or sent something that is not a message."""


class Channel(Protocol):
    """A socket, or one end of a pipe."""

    def fileno(self) -> int:
        """Return the descriptor."""

    def close(self) -> None:
        """Close it."""


def wait_readable(things: Iterable[Any], timeout: float | None = None) -> set[Any]:
    """Return the streams, sockets and process sentinels that are readable, waiting for one if necessary."""
    return set(wait(things, timeout))


def take_stdin_and_stdout() -> tuple[int, int]:
    """Return descriptors of stdin and stdout, which no child process has. What this process prints goes to stderr.

    A line break ends what a login shell may have printed to stdout.
    """
    descriptors = os.dup(0), os.dup(1)
    os.write(1, b"\n")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return descriptors


class MessageStream:
    """Messages over two channels, which may be one socket."""

    def __init__(self, source: Channel, sink: Channel, *, strict: bool = True) -> None:
        """Take over two channels.

        ``strict``: a line that is not a message is an error; otherwise it is skipped, such as the greeting of a login
        shell.
        """
        self._source, self._sink, self._strict = source, sink, strict
        self._received = b""
        for channel in (source, sink):
            os.set_blocking(channel.fileno(), False)

    @staticmethod
    def over(connected: socket.socket) -> MessageStream:
        """Return the stream over a connected socket."""
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _PROBES:
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return MessageStream(connected, connected)

    def fileno(self) -> int:
        """Return the descriptor to wait for, -1 after ``close``."""
        try:
            return self._source.fileno()
        except ValueError:  # a closed file
            return -1

    def send(self, message: Message) -> None:
        """Send a message. Raises: StreamError if the other end is gone or does not read in time."""
        unsent, end = encode(message), time.monotonic() + SEND_SECONDS
        try:
            while unsent := unsent[self._write(unsent) :]:
                left = end - time.monotonic()
                if left <= 0:
                    raise StreamError("the connection broke: timed out")
                poll = select.poll()
                poll.register(self._sink.fileno(), select.POLLOUT)
                poll.poll(left * 1e3)
        except (OSError, ValueError) as error:  # ValueError: a closed file
            raise StreamError(f"the connection broke: {getattr(error, 'strerror', None) or error}") from None

    def _write(self, data: bytes) -> int:
        """Write as much as the other end takes now; return the number of bytes."""
        try:
            return os.write(self._sink.fileno(), data)
        except BlockingIOError:
            return 0

    def receive(self) -> list[Message]:
        """Return the messages that have arrived completely.

        Raises: StreamError at the end of the stream and, if strict, for a line that is not a message.
        """
        try:
            chunk = os.read(self._source.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return []
        except (OSError, ValueError) as error:
            raise StreamError(f"the connection broke: {getattr(error, 'strerror', None) or error}") from None
        if not chunk:
            raise StreamError("the connection was closed")
        *lines, self._received = (self._received + chunk).split(b"\n")
        if self._strict and len(self._received) > LARGEST_LINE_BYTES:
            raise StreamError("a line is too long for a message")
        messages = []
        for line in lines:
            try:
                messages.append(decode(line))
            except ValueError:
                if self._strict:
                    raise StreamError("a line that is not a message arrived") from None
        return messages

    def hold(self) -> None:
        """Stop using the stream, but keep it open until this process ends."""
        os.dup(self._source.fileno())

    def close(self) -> None:
        """Close both sides."""
        for channel in (self._sink, self._source):
            with contextlib.suppress(OSError):
                channel.close()
