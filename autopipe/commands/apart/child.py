"""The other side of ``process``: a process that runs one function for the command that started it, and ends."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from autopipe.commands.apart.errors import described
from autopipe.launch.rank.parent_death import allow_children, die_with_parent
from autopipe.launch.rank.signals import leave_signals_to_supervisor


class Link:
    """Messages to the command, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._stop = False

    def progress(self, what: str, fraction: float) -> None:
        """Report progress, as ``commands.settings.Progress``."""
        self.send("progress", what=what, fraction=fraction)

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message of JSON values; numbers may be NaN or infinite."""
        with self._lock:
            self._connection.send_bytes(json.dumps({"kind": kind, **fields}).encode())

    def ask(self, kind: str, **fields: Any) -> None:
        """Send a message, and wait until the command has accepted it. If it does not, it ends this process."""
        self.send(kind, asks=True, **fields)
        self._connection.recv_bytes()

    def stop_requested(self) -> bool:
        """Return whether the command has sent ``STOP``. A function that asks (``ask``) must not call this."""
        if not self._stop and self._connection.poll():
            self._stop = self._connection.recv_bytes() == STOP
        return self._stop


STOP = b"stop"
"""The message that requests a function to stop, if it supports that; see ``Link.stop_requested``."""

Function = Callable[[Any, Link], Any]
"""What runs in the process: takes the task and the link, and returns JSON values."""


class _Log(logging.Handler):
    """Sends the log to the command, which has the user's handlers."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record."""
        with contextlib.suppress(OSError):  # the command has ended
            self._link.send("log", name=record.name, level=record.levelno, text=record.getMessage())


def run_forked(connection: Connection) -> None:
    """Serve in a process that the fork server of the ranks has forked."""
    die_with_parent()
    os.setsid()  # it is ended together with the processes that the user's data starts
    serve(connection)


def serve(connection: Connection) -> None:
    """Run the function that the first message names, and send its result, or its error. Does not return."""
    leave_signals_to_supervisor()
    allow_children()
    link = Link(connection)
    task = json.loads(connection.recv_bytes())
    os.chdir(task["folder"])
    torch.set_num_threads(task["threads"])
    logging.basicConfig(level=task["log_level"], handlers=[_Log(link)], force=True)
    try:
        module, _, name = task["function"].partition(":")
        function: Function = getattr(importlib.import_module(module), name)
        answer = {"kind": "done", "value": function(task["task"], link)}
    except BaseException as error:
        answer = {"kind": "error", "error": described(error)}
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader may be gone
            stream.flush()
    with contextlib.suppress(OSError):  # the command has ended
        link.send(**answer)
    os._exit(0)  # workers of a DataLoader may still run; they end with their parent


if __name__ == "__main__":
    die_with_parent()
    serve(Connection(int(sys.argv[1])))
