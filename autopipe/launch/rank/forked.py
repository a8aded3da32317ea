"""Ranks of this machine: processes of a fork server that has already imported torch, so that each starts at once.

All launchers start their ranks here: the local one, and the peers on other hosts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from autopipe.errors import RunError, WorkerError
from autopipe.ir import artifact
from autopipe.launch.rank.heartbeat import Beat, Heartbeats
from autopipe.launch.request import WorkerSpec
from autopipe.workers.fork_server import END_SECONDS, fork

# per rank and poll: a rank that reports a lot must not hide the end of another
_MOST_EVENTS = 200
# the parent of a process detects its death at once
PATIENCE_SECONDS = 0.5


@dataclass(slots=True)
class _Process:
    """The process of one rank."""

    rank: int
    process: ForkServerProcess
    connection: Connection  # carries the rank's events
    ended: bool = False


class ForkedRanks:
    """The ranks of a run that run on this machine: all of them, or some."""

    patience_seconds = PATIENCE_SECONDS

    def __init__(self, scratch: Path, world_size: int, hosts: Sequence[str] = ()) -> None:
        """Create the heartbeat file in ``scratch``. It has a slot for every rank of the run, at the rank's number.

        ``hosts``: the host of every rank; (): unnamed.
        """
        self.hosts = tuple(hosts) or ("",) * world_size
        self.heartbeats = scratch / "heartbeats"
        self._beats = Heartbeats(self.heartbeats, world_size, create=True)
        self._processes: list[_Process] = []

    def start(self, spec: WorkerSpec, listener: socket.socket | None = None) -> None:
        """Start one rank. ``listener``: the listening socket of rank 0, if the ranks rendezvous over the network.

        Raises: WorkerError if the fork server ends repeatedly before the rank has started.
        """
        receive, send = multiprocessing.get_context("forkserver").Pipe(duplex=False)
        arguments = json.dumps(artifact.encode(spec)), send, listener
        try:
            process = fork(rank_entry, arguments, name=f"rank {spec.rank}")
        except RunError as error:
            raise WorkerError(error.what, rank=spec.rank, host=spec.host, remedy=error.remedy) from None
        send.close()
        self._processes.append(_Process(spec.rank, process, receive))

    def waitable(self) -> list[Any]:
        """Return the objects that become ready when a rank reports something or ends."""
        connections: list[Any] = [entry.connection for entry in self._processes if not entry.connection.closed]
        return connections + [entry.process.sentinel for entry in self._processes if not entry.ended]

    def poll(self, timeout: float) -> Iterator[dict[str, Any]]:
        """Return the events of the ranks, and the ends of processes, within ``timeout`` seconds."""
        ready = set(wait(self.waitable(), timeout))
        for entry in self._processes:
            if entry.connection in ready:
                yield from itertools.islice(self._read(entry), _MOST_EVENTS)
        for entry in self._processes:
            if not entry.ended and entry.process.sentinel in ready:
                yield from self._read(entry)  # its last events come before its end
                entry.process.join()
                entry.ended = True
                yield {
                    "kind": "exit",
                    "rank": entry.rank,
                    "code": entry.process.exitcode,
                    "time_ns": time.time_ns(),
                }

    def _read(self, entry: _Process) -> Iterator[dict[str, Any]]:
        if entry.connection.closed:
            return
        try:
            while entry.connection.poll():
                yield json.loads(entry.connection.recv_bytes())
        except (EOFError, OSError):
            entry.connection.close()

    def beats(self) -> list[Beat]:
        """Return the last heartbeat of every rank of the run; those of other machines are empty."""
        return [self._beats.read(rank) for rank in range(len(self.hosts))]

    def beat(self, rank: int) -> Beat:
        """Return the last heartbeat of a rank of this machine. Raises: ValueError after ``end``."""
        return self._beats.read(rank)

    def set_stop(self, before: int, agreed: bool) -> None:
        """Show every rank the minibatch before which it stops, and whether that is agreed."""
        self._beats.set_stop(before, agreed)

    def write_stacks(self) -> dict[int, str]:
        """Make every rank write its stacks to its log; return the ranks whose process is stopped."""
        unusual = {}
        for entry in self._processes:
            if not entry.ended:
                _signal(entry.process, signal.SIGUSR2)
                with contextlib.suppress(psutil.Error):
                    if psutil.Process(entry.process.pid).status() == psutil.STATUS_STOPPED:
                        unusual[entry.rank] = "stopped by a signal"
        return unusual

    def end(self) -> None:
        """Kill the remaining processes and release their resources."""
        for entry in self._processes:
            if not entry.ended:
                _signal(entry.process, signal.SIGKILL)
        for entry in self._processes:
            entry.process.join(END_SECONDS)
            entry.connection.close()
        self._processes.clear()
        self._beats.close()


def rank_entry(text: str, connection: Connection, listener: socket.socket | None) -> None:
    """Run one rank; see ``worker.rank_main``. The fork server has imported that module already."""
    from autopipe.launch.rank.worker import rank_main  # with torch, which the parent need not import

    rank_main(text, connection, listener)


def _signal(process: ForkServerProcess, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, number)
