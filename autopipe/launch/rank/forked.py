"""Ranks of this machine: processes of a fork server that has already imported torch, so that each starts at once.

All launchers start their ranks here: the local one, the agent on a remote host, and the processes of a cluster.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from autopipe.errors import RunError, WorkerError
from autopipe.ir import artifact
from autopipe.launch.rank.heartbeat import Beat, Heartbeats
from autopipe.launch.rank.signals import stop_signals_blocked
from autopipe.launch.request import WorkerSpec

PRELOAD = ["autopipe.launch.rank.fork_server_preload"]
FORK_SERVER: Any = forkserver._forkserver  # it has no public name
# for a killed process to end: its GPU's driver releases the memory first
END_SECONDS = 15.0
# a socket's path holds 107 bytes, and multiprocessing's own names take up to 40 of them
_LONGEST_FOLDER = 60
_STARTS = 20
_START_PAUSE_SECONDS = 0.05
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
        process = _forked(spec, send, listener)
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


def _forked(spec: WorkerSpec, send: Connection, listener: socket.socket | None) -> ForkServerProcess:
    """Fork a rank. If the fork server ends meanwhile, start another."""
    from autopipe.launch.rank.entry import rank_entry

    for _ in range(_STARTS):
        preload()
        process = multiprocessing.get_context("forkserver").Process(
            target=rank_entry,
            args=(json.dumps(artifact.encode(spec)), send, listener),
            name=f"rank {spec.rank}",
            daemon=True,
        )
        try:
            process.start()
        except (EOFError, OSError):
            time.sleep(_START_PAUSE_SECONDS)  # until the kernel reports its end
        else:
            return process
    raise WorkerError(
        f"the process that ranks are forked from ended {_STARTS} times before rank {spec.rank} started",
        rank=spec.rank,
        host=spec.host,
        remedy="check whether the machine is short of memory or of processes (ulimit -u)",
    )


def preload(also: Sequence[str] = ()) -> None:
    """Start the fork server, which imports torch in the background, unless it runs.

    It ignores the signals that request the end of a run: this process handles them. ``also``: further modules that it
    imports.
    """
    prepare_fork_server(also)
    with stop_signals_blocked():
        forkserver.ensure_running()


def end_fork_server() -> None:
    """End the fork server, if it runs. The next rank is forked from a new one, with another seed of string hashes."""
    with stop_signals_blocked():
        FORK_SERVER._stop()


def fork_server_runs() -> bool:
    """Return whether this process has a fork server, which may have ended meanwhile."""
    return FORK_SERVER._forkserver_pid is not None


def prepare_fork_server(also: Sequence[str] = ()) -> None:
    """Set up what the fork server needs: a folder for its socket, the modules that it imports, the resource tracker."""
    _shorten_socket_paths()
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *also])
    with stop_signals_blocked():  # the resource tracker unblocks only the signals that it ignores
        resource_tracker.ensure_running()


def _shorten_socket_paths() -> None:
    """Make multiprocessing create its sockets in a directory with a short path, if TMPDIR is too long for them.

    Raises: RunError if no such directory exists.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # it has no public name
    if config.get("tempdir") is not None or len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_FOLDER:
        return
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):  # noqa: S108  # mkdtemp creates a private directory in it
        with contextlib.suppress(OSError):
            config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir=folder)
            atexit.register(shutil.rmtree, config["tempdir"], ignore_errors=True)
            return
    raise RunError(
        f"the path of the folder for temporary files is too long for a socket ({_LONGEST_FOLDER} bytes at most)",
        where=f"TMPDIR={tempfile.gettempdir()}",
        remedy="set TMPDIR to a folder with a shorter path",
    )


def _signal(process: ForkServerProcess, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, number)
