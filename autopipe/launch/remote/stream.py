"""Lines over a pair of pipes or a socket. Reading never blocks; sending blocks for a time that the owner chooses."""

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


class MessageStream:
    """Messages over two channels, which may be one socket."""

    def __init__(
        self, source: Channel, sink: Channel, *, strict: bool = True, send_seconds: float | None = SEND_SECONDS
    ) -> None:
        """Take over two channels.

        ``strict``: a line that is not a message is an error; otherwise it is skipped, such as the greeting of a login
        shell. ``send_seconds``: the longest that ``send`` blocks; None: for as long as it takes; 0: not at all, and
        ``flush`` sends the rest later.
        """
        self._source, self._sink = source, sink
        self._strict, self._send_seconds = strict, send_seconds
        self._received = b""
        self._unsent = b""
        self.num_received = 0  # bytes
        self.sink_closed = False
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

    @property
    def sink(self) -> Channel:
        """The channel to wait for while ``unsent``."""
        return self._sink

    @property
    def unsent(self) -> bool:
        """Whether a message, or a part of one, waits to be sent."""
        return bool(self._unsent) and not self.sink_closed

    def send(self, message: Message) -> None:
        """Send a message. Raises: StreamError if the other end is gone or does not read in time."""
        self._unsent += encode(message)
        end = None if self._send_seconds is None else time.monotonic() + self._send_seconds
        self.flush()
        while self._unsent and self._send_seconds != 0:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise StreamError("the connection broke: timed out")
            poll = select.poll()
            poll.register(self._sink.fileno(), select.POLLOUT)
            poll.poll(None if left is None else left * 1e3)
            self.flush()

    def flush(self) -> None:
        """Send as much as the other end takes now. Raises: StreamError if it is gone."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._sink.fileno(), self._unsent) :]
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:  # ValueError: a closed file
            self._unsent = b""
            raise StreamError(f"the connection broke: {getattr(error, 'strerror', None) or error}") from None

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
        self.num_received += len(chunk)
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

    def close_sink(self) -> None:
        """Close the sending side."""
        self.sink_closed = True
        with contextlib.suppress(OSError):
            self._sink.close()

    def close(self) -> None:
        """Close both sides."""
        self.close_sink()
        with contextlib.suppress(OSError):
            self._source.close()
