"""The other side of ``worker``: a process that runs one function for the process that started it, and ends."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch

from autopipe.workers.errors import described
from autopipe.workers.parent_death import allow_children, die_with_parent
from autopipe.workers.signals import leave_signals_to_supervisor


class Link:
    """Messages to the process that started this one, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._stop = False

    def progress(self, what: str, fraction: float) -> None:
        """Report progress, as ``commands.settings.Progress``."""
        self.send("progress", what=what, fraction=fraction)

    def send(self, kind: str, *, memory: int | None = None, **fields: Any) -> None:
        """Send a message of JSON values; numbers may be NaN or infinite. ``memory``: a file descriptor to send, too."""
        carries = {} if memory is None else {"carries": True}
        with self._lock:
            self._connection.send_bytes(json.dumps({"kind": kind, **carries, **fields}).encode())
            if memory is not None:
                reduction.send_handle(self._connection, memory, 0)

    def heard(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next message of ``Worker.tell``; None if none arrives within this time."""
        if not self._connection.poll(seconds):
            return None
        message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return message

    def ask(self, kind: str, **fields: Any) -> None:
        """Send a message, and wait until it is accepted. If it is not, this process is ended."""
        self.send(kind, asks=True, **fields)
        self._connection.recv_bytes()

    def stop_requested(self) -> bool:
        """Return whether ``STOP`` has arrived. A function that asks (``ask``) must not call this."""
        if not self._stop and self._connection.poll():
            self._stop = self._connection.recv_bytes() == STOP
        return self._stop


STOP = b"stop"
"""The message that requests a function to stop, if it supports that; see ``Link.stop_requested``."""

Function = Callable[[Any, Link], Any]
"""What runs in the process: takes the task and the link, and returns JSON values."""


class _Log(logging.Handler):
    """Sends the log to the other process, which has the user's handlers."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record."""
        with contextlib.suppress(OSError):  # the other process has ended
            self._link.send("log", name=record.name, level=record.levelno, text=record.getMessage())


def _leave_terminal() -> None:
    """Read nothing from the terminal, which would stop this process: it belongs to the process group of the command."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)


def run_task(connection: Connection) -> None:
    """Run the function that the first message names, and send its result, or its error. Does not return."""
    die_with_parent()
    # it is ended together with the processes that the user's data starts; in a session of its own, Linux would weigh an
    # audit of low priority against all ranks together
    os.setpgid(0, 0)
    _leave_terminal()
    leave_signals_to_supervisor()
    allow_children()
    link = Link(connection)
    try:
        request = json.loads(connection.recv_bytes())
    except EOFError:  # the other process was interrupted before it sent the task
        os._exit(1)
    os.chdir(request["folder"])
    torch.set_num_threads(request["threads"])
    logging.basicConfig(level=request["log_level"], handlers=[_Log(link)], force=True)
    try:
        module, _, name = request["function"].partition(":")
        function: Function = getattr(importlib.import_module(module), name)
        answer = {"kind": "done", "value": function(request["task"], link)}
    except BaseException as error:
        answer = {"kind": "error", "error": described(error)}
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader may be gone
            stream.flush()
    with contextlib.suppress(OSError):  # the other process has ended
        link.send(**answer)
    os._exit(0)  # workers of a DataLoader may still run; they end with their parent
