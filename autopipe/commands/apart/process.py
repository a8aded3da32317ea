"""Run a function in a process of its own, so that what it took of a GPU is free when it ends: also its CUDA context.

A command that measures a model on a GPU, or compares it there, starts ranks that compute on the same GPU. So the
command itself never initializes CUDA. Task and result are JSON values. The process is forked from the fork server of
the ranks, which has imported torch and never touched a GPU; without that server it is a new one, which does not import
the calling script.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from autopipe.commands.apart.child import Function, run_forked
from autopipe.commands.apart.errors import restored
from autopipe.errors import AutopipeError, RunError
from autopipe.launch.rank.forked import END_SECONDS, fork_server_runs
from autopipe.launch.rank.unguarded import EXIT_CODE, REMEDY, WHAT
from autopipe.launch.supervisor import death

ALWAYS = "AUTOPIPE_APART"
"""Environment variable for tests: 1 lets this process serve models on a CPU, too."""

Handler = Callable[[str, dict[str, Any]], None]
"""Takes the kind and the fields of a message of the process. If it raises, the process ends."""

_POLL_SECONDS = 0.2
_GROUP_SECONDS, _GROUP_MOST_SECONDS = 0.01, 1.0
_KILLED = "free memory on this host, or use a smaller model or batch; the kernel's log names what it killed (dmesg)"
_CRASHED = "look at its last output: a compiled extension of the model, or the driver of the GPU, may have failed"


def is_needed(kind: str) -> bool:
    """Return whether a device of this kind ("cpu", "cuda") is used in a process of its own."""
    return kind == "cuda" or os.environ.get(ALWAYS) == "1"


def run_apart(
    function: Function,
    task: Any,
    handle: Handler,
    *,
    doing: str,
    failure: type[AutopipeError] = RunError,
    instead: str = "",
) -> Any:
    """Return the result of a function of a module, called in another process, which has ended by then.

    ``task``: JSON values. ``handle``: takes the messages of the function. ``doing``: what the function does, for the
    error if the process ends early, which is a ``failure``. ``instead``: a further remedy for it.

    Raises: the errors of the function and of ``handle``.
    """
    process = forked_or_new()
    try:
        answer = process.converse(request(function, task, threads=torch.get_num_threads()), handle)
    finally:
        process.end()
    if answer is None:
        raise ended_early(process.exit_code, doing, failure, instead)
    if answer["kind"] == "error":
        raise restored(answer["error"])
    return answer["value"]


def ended_early(
    code: int | None, doing: str, failure: type[AutopipeError] = RunError, instead: str = ""
) -> AutopipeError:
    """Return the error of a process that ended without an answer. The arguments are those of ``run_apart``."""
    if code == EXIT_CODE:
        return RunError(WHAT, remedy=REMEDY)
    remedy = _KILLED if code == -signal.SIGKILL else _CRASHED
    return failure(f"{doing}: {death(code)}", remedy="; or ".join(filter(None, [remedy, instead])))


def request(function: Function, task: Any, *, threads: int) -> bytes:
    """Return the message that makes a process call a function of a module. ``threads``: those that torch may use."""
    fields = {
        "function": f"{function.__module__}:{function.__name__}",
        "task": task,
        "folder": str(Path.cwd()),
        "threads": threads,
        "log_level": logging.getLogger("autopipe").getEffectiveLevel(),
    }
    return json.dumps(fields).encode()


class ApartProcess:
    """A process that runs one function: the first message that it receives is a ``request``."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkServerProcess, connection: Connection) -> None:
        self.process = process
        self.connection = connection

    @classmethod
    def forked(cls) -> ApartProcess:
        """Fork it from the server of the ranks. Raises: EOFError or OSError if the server has ended."""
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(target=run_forked, args=(theirs,), name="apart", daemon=True)
        with theirs:
            process.start()
        return cls(process, ours)

    @classmethod
    def new(cls) -> ApartProcess:
        """Start a new one, which imports what this process can import."""
        ours, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)  # noqa: PTH100  # "" is this folder
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "autopipe.commands.apart.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        return cls(process, ours)

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.poll() is None
        return self.process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """Its exit code once it has ended, below 0 for the number of a signal."""
        return self.process.returncode if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    def converse(self, text: bytes, handle: Handler) -> dict[str, Any] | None:
        """Send the request, and handle messages until the last one, which is returned; None if it ends before that."""
        self.send(text)
        while (message := self._next()) is not None:
            if message["kind"] in ("done", "error"):
                break
            self._handle(message, handle)
        self._join()
        return message

    def _next(self) -> dict[str, Any] | None:
        """Wait for the next message. Return None if the process ends without one."""
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                alive = self.is_alive  # before the poll: what it sent last has arrived then
                if self.connection.poll(_POLL_SECONDS):
                    message: dict[str, Any] = json.loads(self.connection.recv_bytes())
                    return message
                if not alive:
                    break
        return None

    def send(self, message: bytes) -> None:
        """Send it a message, unless it has ended."""
        with contextlib.suppress(ConnectionError):  # it has ended, which ``_next`` notices
            self.connection.send_bytes(message)

    def _handle(self, message: dict[str, Any], handle: Handler) -> None:
        kind, asks = message.pop("kind"), message.pop("asks", False)
        if kind == "log":
            log(message)
        else:
            handle(kind, message)
        if asks:
            self.send(b"accepted")

    def _join(self) -> None:
        if isinstance(self.process, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        else:
            self.process.join(END_SECONDS)

    def end(self) -> None:
        """Kill it, unless it has ended, and the processes that it has started; return when they have ended."""
        assert self.process.pid is not None, "it has started"
        self._kill_group(self.process.pid)  # a number that a group has is not used again
        if self.is_alive:
            self.process.kill()  # a forked process may not have its own group yet
            self._join()
        deadline = time.monotonic() + _GROUP_MOST_SECONDS  # a zombie that no process reaps stays
        while self._kill_group(self.process.pid) and time.monotonic() < deadline:
            time.sleep(_GROUP_SECONDS)
        self.connection.close()

    @staticmethod
    def _kill_group(number: int) -> bool:
        """Kill the processes of a group; return whether there were any."""
        try:
            os.killpg(number, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def log(message: dict[str, Any]) -> None:
    """Write a record of the process's log to the log of this one."""
    logging.getLogger(message["name"]).log(message["level"], "%s", message["text"])


def forked_or_new() -> ApartProcess:
    """Return a process: forked from the server of the ranks if that runs, else a new one."""
    if fork_server_runs():
        with contextlib.suppress(EOFError, OSError):  # the fork server was killed meanwhile
            return ApartProcess.forked()
    return ApartProcess.new()
