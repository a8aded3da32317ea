"""``TokenKeeper``: gives the token of each device to one process at a time (``autopipe.runtime.spilling.token``).

It is a thread of the sweep. Among the jobs that wait for a device it prefers the one with the longest remaining time.
A process that gives the token back lets those that wait go first, so no job waits for longer than one shard of each of
the others. The kernel reports the end of a process, also if it was killed, or if its children have its socket still.
A process that sends anything else is dropped, and so are those that a failed call of the system concerns: the thread
goes on for all others.
"""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from autopipe.runtime.spilling.token import GIVE, GRANTED, TAKE
from autopipe.runtime.unix_sockets import listening, other_process

_NAME = "token"
_HELLO_BYTES = 64  # DEVICE:JOB and a new line, at most
RETRY_SECONDS = 0.05  # after a connection could not be accepted


@dataclass(eq=False, slots=True)
class _Client:
    """A process that shares a device."""

    socket: socket.socket
    process: int  # a descriptor that becomes readable when the process ends
    hello: bytes = b""  # what it has sent of its device and job
    device: int = -1  # -1: it has not said it
    job: int = -1


@dataclass(slots=True)
class _Device:
    """The token of a device."""

    holder: _Client | None = None
    waiting: list[_Client] = field(default_factory=list)


class TokenKeeper:
    """Keeps the tokens of all devices of a sweep.

    Args:
        folder: of the sweep; the socket is in a new folder there, which only this user may enter.
        remaining: returns the remaining seconds of a job, by its number. It is called in the keeper's thread; a job for
            which it raises KeyError is dropped.

    """

    def __init__(self, folder: Path, remaining: Callable[[int], float]) -> None:
        self._remaining = remaining
        for abandoned in folder.glob("token-*"):  # of a sweep that was killed: this one has its lock
            shutil.rmtree(abandoned, ignore_errors=True)
        self._devices: dict[int, _Device] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="token-", dir=folder)).absolute()  # with mode 0700
        self._listener = listening(self._folder / _NAME)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._ended, self._end = os.pipe()
        self._selector.register(self._ended, selectors.EVENT_READ, None)
        self._clients: set[_Client] = set()
        self._thread = threading.Thread(target=self._run, name="autopipe-token", daemon=True)
        self._thread.start()

    def address(self, device: int, job: int) -> str:
        """Return the value of the environment variable for a job on a device."""
        return f"{device}:{job}:{self._folder / _NAME}"

    def holder(self, device: int) -> int | None:
        """Return the job that has the token of a device, or None."""
        holder = self._devices[device].holder if device in self._devices else None
        return None if holder is None else holder.job

    def close(self) -> None:
        """End. Processes that wait for a token get an error."""
        os.close(self._end)
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fd == self._ended:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._clients:
                        self._serve(key.data, ended=key.fd == key.data.process)
        finally:
            self._devices.clear()  # no rank gets a token of one that ends
            for client in list(self._clients):
                self._drop(client)
            self._selector.close()
            self._listener.close()
            os.close(self._ended)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has ended, or there are too many open files
            time.sleep(RETRY_SECONDS)  # the connection may wait still
            return
        try:
            connection.setblocking(False)
            process = os.pidfd_open(other_process(connection))
        except OSError:  # it has ended
            connection.close()
            return
        client = _Client(connection, process)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._selector.register(process, selectors.EVENT_READ, client)

    def _serve(self, client: _Client, *, ended: bool) -> None:
        received = b""
        if not ended:
            try:
                received = client.socket.recv(_HELLO_BYTES)
            except BlockingIOError:  # nothing is there after all
                return
            except OSError:
                pass
        try:
            if not received:
                raise ValueError("it has ended")
            if client.device < 0:
                received = self._welcome(client, received)
            for message in received:
                if client in self._clients:  # the grant before reached it
                    self._take(client, bytes((message,)))
        except (ValueError, KeyError):
            self._drop(client)

    def _welcome(self, client: _Client, received: bytes) -> bytes:
        """Take the device and the job that a process says first; return what it has sent behind.

        Raises: ValueError if it says anything else; KeyError for an unknown job.
        """
        client.hello += received
        hello, line, rest = client.hello.partition(b"\n")
        device, _, job = hello.partition(b":")
        is_begun = len(hello) <= _HELLO_BYTES and hello.replace(b":", b"0").isdigit()
        if not is_begun or (line and not (device.isdigit() and job.isdigit())):
            raise ValueError(f"{hello!r} is not DEVICE:JOB")
        if line:
            self._remaining(int(job))
            client.device, client.job = int(device), int(job)
            self._devices.setdefault(client.device, _Device())
        return rest

    def _take(self, client: _Client, message: bytes) -> None:
        """Carry out a message. Raises: ValueError if the process may not send it now."""
        device = self._devices[client.device]
        if message == TAKE and device.holder is not client and client not in device.waiting:
            device.waiting.append(client)
        elif message == GIVE and device.holder is client:
            device.holder = None
        else:
            raise ValueError(f"unexpected {message!r}")
        self._grant(device)

    def _grant(self, device: _Device) -> None:
        while device.holder is None and device.waiting:
            client = max(device.waiting, key=lambda waiting: self._remaining(waiting.job))
            device.waiting.remove(client)
            device.holder = client
            try:
                client.socket.sendall(GRANTED)
            except OSError:
                self._drop(client)

    def _drop(self, client: _Client) -> None:
        """Forget a process that has ended, and release its token."""
        if client not in self._clients:
            return
        self._clients.remove(client)
        self._selector.unregister(client.socket)
        self._selector.unregister(client.process)
        client.socket.close()
        os.close(client.process)
        device = self._devices.get(client.device)
        if device is not None:
            if client in device.waiting:
                device.waiting.remove(client)
            if device.holder is client:
                device.holder = None
            self._grant(device)
