"""``Ranks``: the processes of the stages, as the controller sees them. None is forked from the process of the script.

Where they are, and how they connect, is in ``places``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from autopipe.errors import WorkerError
from autopipe.launch.remote import network
from autopipe.script.devices import CPU
from autopipe.script.rank.serve import FILE, LISTEN, LOSES, LOST
from autopipe.script.rank_locations import Connection, Places
from autopipe.script.rank_order import RankOrder
from autopipe.script.refusals import refused
from autopipe.script.settings import settings_now
from autopipe.script.wire import GoneError, Wire

_CAUSE_SECONDS = 5.0  # until the rank that failed first is seen, after one that ends because of it


class Ranks:
    """The ranks of one run, and the folder of their stage files."""

    def __init__(
        self,
        places: Places,
        order: RankOrder,
        timeout: float,
        folder: Path | None = None,
        needed_bytes: Sequence[int] = (),
        device: torch.device = CPU,
    ) -> None:
        """``folder``: where stage files remain; None for a temporary folder. ``timeout``: seconds of silence.

        ``needed_bytes``: the predicted memory of each rank. ``device``: of the script's model.
        """
        self.device, self.order = device, order
        self.kinds: list[Any] = []  # of the rank's devices
        self.count, self.places, self.timeout = places.count, places, timeout
        self.temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="autopipe-run-")) if folder is None else folder
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "store").unlink(missing_ok=True)
        self.connections: list[Connection] = []
        self.wires: list[Wire] = []
        self.owner = os.getpid()
        self._waiting_since, self._waited = 0.0, 0
        self._losing: dict[int, bool] = {}  # ranks that end because of another one; whether SIGTERM ends them
        try:
            self._start_all(needed_bytes)
        except BaseException:
            self.close(failed=True)
            raise

    def _start_all(self, needed_bytes: Sequence[int]) -> None:
        """Start the ranks, and wait until they are connected. Raises: WorkerError."""
        self.connections = self.places.connect(self._start, self.timeout, needed_bytes)
        self.wires = [Wire(connection.end, self._check) for connection in self.connections]
        store = LISTEN if self.places.are_remote else FILE
        for rank in range(self.count):
            local = sum(other.host == self.connections[rank].host for other in self.connections[:rank])
            place = {"device": self.device.type, "local_rank": local, "stages": self.order.num_stages}
            settings = {"path": list(sys.path), "store": store, "address": "", **place, **settings_now()}
            if store == LISTEN:
                self.send(rank, {**settings, "address": self.places.address})
                store = self.receive(rank)
                network.refuse_public(network.parse_tcp(store)[0], trusted=self.places.settings.trust_network)
            else:
                self.send(rank, settings)
        self.kinds = [self.receive(rank) for rank in range(self.count)]
        for wire in self.wires:
            wire.device = self.device

    def needs_files(self, rank: int) -> bool:
        """Return whether a rank has no folder in common with the controller."""
        return self.connections[rank].joins

    def _start(self, rank: int) -> Connection:
        here, there = socket.socketpair()
        numbers = there.fileno(), rank, self.count, self.owner
        words = [*map(str, numbers), str(self.folder), str(self.timeout)]
        words += ["temporary"] if self.temporary else []
        if self.places.server is not None:
            forked = self.places.server.start(words[1:], there)
            if forked is not None:
                there.close()
                return Connection(here, forked)
        package = str(Path(__file__).resolve().parents[2])
        code = (
            f"import sys; sys.path.insert(0, {package!r}); "
            "from autopipe.script.rank.serve import main; main(sys.argv[1:])"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output belongs to the script
            start_new_session=True,  # Ctrl-C reaches the controller only
        )
        there.close()
        return Connection(here, process)

    def _check(self) -> None:
        """Raise WorkerError if a rank has ended, or nothing has arrived for too long."""
        for rank in range(len(self.connections)):
            code = self._code(rank)
            if code is not None and code != 0:
                raise self._failure(rank, code)
        if self._waiting_since and time.monotonic() - self._waiting_since > self.timeout:
            host = self.connections[self._waited].host
            what = f"no answer for {self.timeout:.0f} s"
            raise WorkerError(what, rank=self._waited, host=host, remedy="a larger --timeout")

    def _code(self, rank: int) -> int | None:
        """Return the exit code of a rank's process; None if it runs, or another process started it."""
        process = self.connections[rank].process
        return None if process is None else process.poll()

    def _failure(self, rank: int, code: int) -> WorkerError:
        """Return the error of the rank that failed first: others say that they end because of it."""
        gone: set[int] = set()
        losing = self._losing.keys()
        end = time.monotonic() + _CAUSE_SECONDS
        while True:
            for other, wire in enumerate(self.wires):
                report = _last_of(wire, gone, self._losing, other)
                if report is not None:
                    return self._failed(other, report)
            codes = {other: self._code(other) for other in range(len(self.connections))}
            failed = [other for other, ended in codes.items() if ended not in (None, 0, LOST)]
            first = [*failed, *(other for other in sorted(gone - losing) if self.connections[other].process is None)]
            if first or time.monotonic() > end:
                break
            time.sleep(0.05)
        if not first:  # the first one was ended by SIGTERM, or has not ended: its host does not answer
            first = [other for other, terminated in self._losing.items() if terminated]
            first += [other for other in codes if other not in losing and self.connections[other].process is None]
        rank = (first or [rank])[0]
        code = codes[rank] or code
        host = self.connections[rank].host
        if host:
            how = "is gone: it was killed, or its host does not answer"
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return WorkerError(
            f"the process of a stage {how}; the run cannot continue", rank=rank, host=host, remedy="start it again"
        )

    def _failed(self, rank: int, message: list[str]) -> WorkerError:
        """Return the error for a rank's report: ["error", text, traceback]."""
        what, host = f"a stage failed: {message[1]}", self.connections[rank].host
        stage = self.order.stage_of(rank)
        return WorkerError(what, rank=rank, host=host, stage=stage, remote_traceback=message[2])

    def send(self, rank: int, command: Any) -> None:
        """Send a command without waiting. Raises: WorkerError, UnsendableError, RefusedError."""
        if os.getpid() != self.owner:
            raise refused("the model, or an output of it, is used in a process that the script has forked")
        try:
            self.wires[rank].send(command)
        except GoneError:
            raise self._gone(rank) from None

    def receive(self, rank: int, *, parks: bool = False) -> Any:
        """Return the next answer of a rank, with its tensors parked or on the device. Raises: WorkerError."""
        self._waiting_since, self._waited = time.monotonic(), rank
        try:
            message = self.wires[rank].receive(parks=parks)
        except GoneError:
            raise self._gone(rank) from None
        finally:
            self._waiting_since = 0.0
        if message[0] == "error":
            raise self._failed(rank, message)
        if message[0] == LOSES:
            self._losing[rank] = message[1]
            raise self._failure(rank, LOST)
        return message[-1]

    def _gone(self, rank: int) -> WorkerError:
        process = self.connections[rank].process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
        code = self._code(rank)
        return self._failure(rank, -1 if code is None else code)

    def close(self, *, failed: bool) -> None:
        """End the ranks: in order, or at once if the run has failed. Does nothing in a forked process."""
        if os.getpid() != self.owner:
            return
        processes = [connection.process for connection in self.connections if connection.process is not None]
        if not failed:
            with contextlib.suppress(WorkerError):
                for rank in range(self.count):
                    self.send(rank, ["end"])
                for wire in self.wires:
                    wire.close()
                for process in processes:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(10.0)
        for connection in self.connections:  # a rank elsewhere ends with its connection
            with contextlib.suppress(OSError):
                connection.end.shutdown(socket.SHUT_RDWR)
            connection.end.close()
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        if self.temporary:
            shutil.rmtree(self.folder, ignore_errors=True)


def _last_of(wire: Wire, gone: set[int], losing: dict[int, bool], rank: int) -> list[Any] | None:
    """Read what a rank has sent: return its report of an error, and note whether it is gone or ends with another."""
    with contextlib.suppress(OSError, ValueError, WorkerError):  # of a socket that is closed
        try:
            while rank not in gone and wire.ready():
                message: list[Any] = wire.receive()
                if message[0] == "error":
                    return message
                if message[0] == LOSES:
                    losing[rank] = message[1]
        except GoneError:
            gone.add(rank)
    return None
