"""``Wire``: messages between the controller and one rank over a socket. Sending never waits for the receiver."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from autopipe.script.codec import decoded, encoded
from autopipe.script.devices import CPU

_MOST_WAITING = 256 << 20
"""Bytes that may wait to be sent; more block the sender, which has then run far ahead of the receiver."""


class GoneError(EOFError):
    """The other end has closed the connection."""


def is_readable(end: socket.socket | int, seconds: float | None) -> bool:
    """Wait until there is something to read. ``select.select`` takes no descriptor above 1,023."""
    waiting = select.poll()
    waiting.register(end, select.POLLIN)
    return bool(waiting.poll(None if seconds is None else 1000 * seconds))


class Wire:
    """One end of a connection. ``alive``: called while waiting; raises if the other process has ended.

    ``device``: of this process, for values that are not on the host.
    """

    def __init__(self, end: socket.socket, alive: Callable[[], None] = lambda: None) -> None:
        self._socket, self._alive = end, alive
        self.device = CPU
        self._queue: queue.SimpleQueue[list[bytes | memoryview] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._waiting, self._broken = 0, False
        self.waited_seconds = 0.0  # for messages
        self._thread = threading.Thread(target=self._work, name="wire", daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        """Copy the message, and send it in another thread. Raises: UnsendableError, GoneError."""
        parts = encoded(message, self.device)
        size = sum(len(part) for part in parts)
        with self._changed:
            while self._waiting > _MOST_WAITING and not self._broken:
                if not self._changed.wait(1.0):
                    self._alive()
            if self._broken:
                self._alive()
                raise GoneError("the other process has closed its connection")
            self._waiting += size
        self._queue.put(parts)

    def flush(self) -> None:
        """Wait until everything has been sent, or the other end is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting == 0 or self._broken)

    def receive(self, *, parks: bool = False) -> Any:
        """Return the next message. Raises: GoneError if the other end is gone, and what ``alive`` raises.

        ``parks``: whether tensors on the device are parked (``state.parked``).
        """
        return decoded(self._read, self.device, parks=parks)

    def ready(self) -> bool:
        """Return whether a message has begun to arrive."""
        return is_readable(self._socket, 0.0)

    def close(self, seconds: float = 5.0) -> None:
        """Send what waits, for at most ``seconds``, and close."""
        self._queue.put(None)
        self._thread.join(seconds)
        with contextlib.suppress(OSError):
            self._socket.close()

    def _read(self, buffer: memoryview) -> None:
        while buffer:
            begin = time.monotonic()
            arrived = is_readable(self._socket, 1.0)
            self.waited_seconds += time.monotonic() - begin
            if not arrived:
                self._alive()
                continue
            try:
                count = self._socket.recv_into(buffer)
            except ConnectionError as error:
                raise GoneError(str(error)) from error
            if not count:
                raise GoneError("the other process has closed its connection")
            buffer = buffer[count:]

    def _work(self) -> None:
        while (parts := self._queue.get()) is not None:
            try:
                for part in parts:
                    self._socket.sendall(part)
            except OSError:
                with self._changed:
                    self._broken = True
                    self._changed.notify_all()
                return
            with self._changed:
                self._waiting -= sum(len(part) for part in parts)
                self._changed.notify_all()
                self._changed.notify_all()
