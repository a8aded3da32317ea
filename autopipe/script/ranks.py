"""``Ranks``: the processes of the stages, as the controller sees them. Each is started clean, not forked."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from autopipe.errors import WorkerError
from autopipe.script.refusals import refused
from autopipe.script.settings import settings_now
from autopipe.script.wire import GoneError, Wire

START_SECONDS = 300.0


class Ranks:
    """The ranks of one run, and the folder of their stage files."""

    def __init__(self, count: int, timeout: float, folder: Path | None = None) -> None:
        """``folder``: where stage files remain; None for a temporary folder. ``timeout``: seconds of silence."""
        self.count, self.timeout = count, timeout
        self.temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="autopipe-run-")) if folder is None else folder
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "store").unlink(missing_ok=True)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.wires: list[Wire] = []
        self.owner = os.getpid()
        self._waiting_since, self._waited = 0.0, 0
        try:
            self._start_all()
        except BaseException:
            self.close(failed=True)
            raise

    def _start_all(self) -> None:
        """Start the ranks, and wait until they are connected. Raises: WorkerError."""
        for rank in range(self.count):
            self._start(rank)
        settings = {"path": list(sys.path), **settings_now()}
        for rank in range(self.count):
            self.send(rank, settings)
        for rank in range(self.count):
            self.receive(rank)

    def _start(self, rank: int) -> None:
        here, there = socket.socketpair()
        numbers = there.fileno(), rank, self.count, self.owner
        words = [*map(str, numbers), str(self.folder), str(self.timeout)]
        words += ["temporary"] if self.temporary else []
        package = str(Path(__file__).resolve().parents[2])
        code = (
            f"import sys; sys.path.insert(0, {package!r}); "
            "from autopipe.script.rank.serve import main; main(sys.argv[1:])"
        )
        self.processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code, *words],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to the script
                start_new_session=True,  # Ctrl-C reaches the controller only
            )
        )
        there.close()
        self.wires.append(Wire(here, self._check))

    def _check(self) -> None:
        """Raise WorkerError if a rank has ended, or nothing has arrived for too long."""
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if code is not None and code != 0:
                raise self._failure(rank, code)
        if self._waiting_since and time.monotonic() - self._waiting_since > self.timeout:
            raise WorkerError(f"no answer for {self.timeout:.0f} s", rank=self._waited, remedy="a larger --timeout")

    def _failure(self, rank: int, code: int) -> WorkerError:
        """Return the error of the rank that failed first: others end with code 4 because of it."""
        reports = []
        for other, wire in enumerate(self.wires):
            with contextlib.suppress(GoneError, OSError, WorkerError):
                while wire.ready():
                    message = wire.receive()
                    if message[0] == "error":
                        reports.append((other, message))
        if reports:
            other, message = reports[0]
            return _failed(other, message)
        dead = [(r, p.poll()) for r, p in enumerate(self.processes)]
        first = next(((r, c) for r, c in dead if c not in (None, 0, 4)), (rank, code))
        how = f"was killed by signal {-first[1]}" if (first[1] or 0) < 0 else f"ended with code {first[1]}"
        return WorkerError(
            f"the process of a stage {how}; the run cannot continue", rank=first[0], remedy="start it again"
        )

    def send(self, rank: int, command: Any) -> None:
        """Send a command without waiting. Raises: WorkerError, UnsendableError, RefusedError."""
        if os.getpid() != self.owner:
            raise refused("the model, or an output of it, is used in a process that the script has forked")
        try:
            self.wires[rank].send(command)
        except GoneError:
            raise self._gone(rank) from None

    def receive(self, rank: int) -> Any:
        """Return the next answer of a rank. Raises: WorkerError."""
        self._waiting_since, self._waited = time.monotonic(), rank
        try:
            message = self.wires[rank].receive()
        except GoneError:
            raise self._gone(rank) from None
        finally:
            self._waiting_since = 0.0
        if message[0] == "error":
            raise _failed(rank, message)
        return message[-1]

    def _gone(self, rank: int) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[rank].wait(5.0)
        code = self.processes[rank].poll()
        return self._failure(rank, -1 if code is None else code)

    def close(self, *, failed: bool) -> None:
        """End the ranks: in order, or at once if the run has failed. Does nothing in a forked process."""
        if os.getpid() != self.owner:
            return
        if not failed:
            with contextlib.suppress(WorkerError):
                for rank in range(self.count):
                    self.send(rank, ["end"])
                for wire in self.wires:
                    wire.close()
                for process in self.processes:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(10.0)
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        if self.temporary:
            shutil.rmtree(self.folder, ignore_errors=True)


def _failed(rank: int, message: list[str]) -> WorkerError:
    """Return the error for a rank's report: ["error", text, traceback]."""
    return WorkerError(f"a stage failed: {message[1]}", rank=rank, stage=rank, remote_traceback=message[2])
