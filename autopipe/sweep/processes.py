"""The processes of a sweep, from the side of its supervisor: started, read without waiting, stopped, ended."""

from __future__ import annotations

import contextlib
import json
import sys
import types
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from autopipe.commands.apart.child import STOP, Function
from autopipe.commands.apart.errors import restored
from autopipe.commands.apart.process import ApartProcess, ended_early, forked_or_new, log, request
from autopipe.ir import artifact
from autopipe.launch.rank.forked import preload

IN_SERVER = "autopipe.sweep.child"
"""What the processes run: the server that they are forked from imports it once, which takes a second."""


class SweepProcess:
    """A process that prepares or trains."""

    def __init__(self, function: Function, task: Any, doing: str) -> None:
        """Start it. ``task``: a dataclass; ``doing``: for the error if it ends early."""
        start_server()  # unless it runs
        with _without_main():
            self._process: ApartProcess = forked_or_new()
        self._process.send(request(function, artifact.encode(task), threads=1))
        self._doing = doing
        self.value: dict[str, Any] | None = None  # what the function returned
        self.error: Exception | None = None  # what it raised, or the error of its early end
        self.died = False  # it ended early
        self.ended = False

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.process.pid is not None, "it has started"
        return self._process.process.pid

    @property
    def connection(self) -> Any:
        """What becomes ready when it sends something."""
        return self._process.connection

    def receive(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (kind, fields) of the messages that it has sent. Afterwards, ``ended`` says whether it has ended."""
        while not self.ended:
            alive = self._process.is_alive  # before the poll: what it sent last has arrived then
            message = self._next()
            if message is None:
                if not alive:
                    self.died = True
                    self.error = ended_early(self._process.exit_code, self._doing)
                    self._end()
                return
            if message["kind"] == "done":
                self.value = message["value"]
                self._end()
            elif message["kind"] == "error":
                self.error = restored(message["error"])
                self._end()
            elif message["kind"] == "log":
                log(message)
            else:
                yield message.pop("kind"), message

    def _next(self) -> dict[str, Any] | None:
        with contextlib.suppress(EOFError, ConnectionError):
            if self._process.connection.poll():
                message: dict[str, Any] = json.loads(self._process.connection.recv_bytes())
                return message
        return None

    def stop(self) -> None:
        """Request it to stop after the current minibatch, with a checkpoint."""
        self._process.send(STOP)

    def kill(self) -> None:
        """End it at once, with its ranks."""
        if not self.ended:
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._process.end()


def wait_for(processes: Sequence[SweepProcess], seconds: float) -> None:
    """Wait until one of the processes sends something, or for this time."""
    wait([process.connection for process in processes], seconds)


def start_server() -> None:
    """Start the server that the processes are forked from, unless it runs."""
    with _without_main():
        preload((IN_SERVER,))


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Start processes that do not import the calling script: a sweep file names models by files and modules."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
