"""``Worker``: a process that runs one function of a module. Task, messages and result are JSON values.

What it took of a GPU is free when it has ended: also its CUDA context. A command that measures a model on a GPU, or
compares it there, starts ranks that compute on the same GPU, so the command itself never initializes CUDA.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from autopipe.errors import AutopipeError, RunError
from autopipe.workers.errors import restored
from autopipe.workers.fork_server import END_SECONDS, death, fork, fork_here
from autopipe.workers.task import STOP, Function, run_task

Handler = Callable[[str, dict[str, Any]], None]
"""Takes the kind and the fields of a message of the process. If it raises, the process ends."""

ALWAYS = "AUTOPIPE_APART"
"""Environment variable for tests: 1 requires a worker for models on a CPU, too."""

_GROUP_SECONDS, _GROUP_MOST_SECONDS = 0.01, 1.0
_KILLED = "free memory on this host, or use a smaller model or batch; the kernel's log names what it killed (dmesg)"
_CRASHED = "look at its last output: a compiled extension of the model, or the driver of the GPU, may have failed"


def needs_worker(kind: str) -> bool:
    """Return whether a device of this kind ("cpu", "cuda") is used in a process of its own."""
    return kind == "cuda" or os.environ.get(ALWAYS) == "1"


class Worker:
    """The process, from the side of the one that started it. Nothing blocks but ``end``."""

    def __init__(
        self,
        function: Function,
        task: Any,
        *,
        doing: str,
        threads: int = 1,
        failure: type[AutopipeError] = RunError,
        instead: str = "",
        here: bool = False,
    ) -> None:
        """Start it.

        ``doing``: what the function does, for the error if the process ends early, which is a ``failure``. ``threads``:
        those that torch may use. ``instead``: a further remedy. ``here``: fork it from this process, which has no
        other thread yet and has not used a GPU, instead of from the fork server.

        Raises: RunError if it cannot be started.
        """
        try:
            folder = str(Path.cwd())
        except OSError as error:
            raise RunError(f"{doing}: the working directory was removed", remedy="start in another one") from error
        self._doing, self._failure, self._instead = doing, failure, instead
        self.value: Any = None  # what the function returned
        self.error: Exception | None = None  # what it raised, or the error of its early end
        self.died = False  # it ended early
        self.ended = False
        self.awaited = False  # this process waits for it at the moment
        self.connection, theirs = multiprocessing.get_context("forkserver").Pipe()
        with theirs:
            self.process: BaseProcess = (
                fork_here(run_task, (theirs,))
                if here
                else fork(run_task, (theirs,), name=function.__name__, imports_main=False)
            )
        request = {
            "function": f"{function.__module__}:{function.__name__}",
            "task": task,
            "folder": folder,
            "threads": threads,
            "log_level": logging.getLogger("autopipe").getEffectiveLevel(),
        }
        self._send(json.dumps(request).encode())

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None, "it has started"
        return self.process.pid

    def receive(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (kind, fields) of the messages that it has sent. Afterwards, ``ended`` says whether it has ended.

        ``fields["memory"]`` is a file descriptor, which the caller closes.
        """
        while not self.ended:
            alive = self.process.is_alive()  # before the poll: what it sent last has arrived then
            message = self._next()
            if message is None:
                if alive:
                    return
                self.died, self.error = True, self._ended_early()
                self.end()
            elif message["kind"] == "done":
                self.value = message["value"]
                self.end()
            elif message["kind"] == "error":
                self.error = restored(message["error"])
                self.end()
            elif message["kind"] == "log":
                logging.getLogger(message["name"]).log(message["level"], "%s", message["text"])
            else:
                asks = message.pop("asks", False)
                if message.pop("carries", False):
                    message["memory"] = reduction.recv_handle(self.connection)
                yield message.pop("kind"), message
                if asks:
                    self._send(b"accepted")

    def _next(self) -> dict[str, Any] | None:
        try:
            if self.connection.poll():
                message: dict[str, Any] = json.loads(self.connection.recv_bytes())
                return message
        except (EOFError, ConnectionError):  # it is about to end, or the user's code has closed all files
            self.process.join(END_SECONDS)
            self.process.kill()
        return None

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # it has ended, which ``receive`` notices
            self.connection.send_bytes(message)

    def _ended_early(self) -> AutopipeError:
        code = self.process.exitcode
        remedy = _KILLED if code == -signal.SIGKILL else _CRASHED
        return self._failure(
            f"{self._doing}: {death(code)}", remedy="; or ".join(filter(None, [remedy, self._instead]))
        )

    def tell(self, **fields: Any) -> None:
        """Send a message of JSON values, which ``Link.heard`` returns."""
        self._send(json.dumps(fields).encode())

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it sends something or ends, or for this time."""
        self.awaited = True
        wait_for([self], seconds)
        self.awaited = False

    def stop(self) -> None:
        """Request the function to stop, if it supports that: see ``Link.stop_requested``."""
        self._send(STOP)

    def end(self) -> None:
        """Kill it, unless it has ended, and the processes that it has started; return when they have ended."""
        if self.connection.closed:
            return
        self.ended = True
        self._kill_group()  # a number that a group has is not used again
        if self.process.is_alive():
            self.process.kill()  # it may not have its own group yet
            self.process.join(END_SECONDS)
        deadline = time.monotonic() + _GROUP_MOST_SECONDS  # a zombie that no process reaps stays
        while self._kill_group() and time.monotonic() < deadline:
            time.sleep(_GROUP_SECONDS)
        self.connection.close()

    def _kill_group(self) -> bool:
        """Kill the processes of its group; return whether there were any."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def wait_for(workers: Sequence[Worker], seconds: float | None = None) -> None:
    """Wait until one of the processes sends something or ends, or for this time."""
    present = [worker for worker in workers if not worker.ended]
    wait([thing for worker in present for thing in (worker.connection, worker.process.sentinel)], seconds)


def result_of(worker: Worker, handle: Handler) -> Any:
    """Return the result of the function of a worker, which has ended by then. ``handle``: takes its messages.

    Raises: the errors of the function and of ``handle``.
    """
    try:
        while not worker.ended:
            wait_for([worker])
            for kind, fields in worker.receive():
                handle(kind, fields)
    finally:
        worker.end()
    if worker.error is not None:
        raise worker.error
    return worker.value
