"""Ranks of this machine: processes of a fork server that has torch imported already, so each is there at once.

The local launcher and the agent on a remote host both start theirs here.
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
END_SECONDS = 5.0
# the path of a socket holds 107 bytes, of which multiprocessing's own names take up to 40
_LONGEST_FOLDER = 60
_STARTS = 20
_START_PAUSE_SECONDS = 0.05
# at a time from one rank: one that says more than can be taken in must not hide the end of another
_MOST_EVENTS = 200
# a death is seen at once by whoever has the process
PATIENCE_SECONDS = 0.5


@dataclass(slots=True)
class _Process:
    rank: int
    process: ForkServerProcess
    connection: Connection
    ended: bool = False


class ForkedRanks:
    """Some of a run's ranks, all on this machine. ``scratch``: a folder for the heartbeats.

    The heartbeats have room for every rank of the run, so that a rank's place in them is its number.
    """

    patience_seconds = PATIENCE_SECONDS

    def __init__(self, scratch: Path, world_size: int, hosts: Sequence[str] = ()) -> None:
        self.hosts = tuple(hosts) or ("",) * world_size
        self.heartbeats = scratch / "heartbeats"
        self._beats = Heartbeats(self.heartbeats, world_size, create=True)
        self._processes: list[_Process] = []

    def start(self, spec: WorkerSpec, listener: socket.socket | None = None) -> None:
        """Start one rank. ``listener``: what rank 0 listens on, where the ranks meet by network.

        Raises: WorkerError where the fork server ends again and again before the rank is there.
        """
        receive, send = multiprocessing.get_context("forkserver").Pipe(duplex=False)
        process = _forked(spec, send, listener)
        send.close()
        self._processes.append(_Process(spec.rank, process, receive))

    @property
    def all_ended(self) -> bool:
        """Whether no process is left."""
        return all(entry.ended for entry in self._processes)

    def waitable(self) -> list[Any]:
        """Return what becomes ready when a rank says something or ends."""
        found: list[Any] = [entry.connection for entry in self._processes if not entry.connection.closed]
        return found + [entry.process.sentinel for entry in self._processes if not entry.ended]

    def poll(self, timeout: float) -> Iterator[dict[str, Any]]:
        """Return what the ranks say, and who has ended, within ``timeout`` seconds."""
        ready = set(wait(self.waitable(), timeout))
        for entry in self._processes:
            if entry.connection in ready:
                yield from itertools.islice(self._read(entry), _MOST_EVENTS)
        for entry in self._processes:
            if not entry.ended and entry.process.sentinel in ready:
                yield from self._read(entry)  # what it said last comes before its end
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
        """Return the last note of every rank of the run; those that are not here have noted nothing."""
        return [self._beats.read(rank) for rank in range(len(self.hosts))]

    def set_stop(self, before: int, agreed: bool) -> None:
        """Tell every rank before which minibatch it is to stop."""
        self._beats.set_stop(before, agreed)

    def write_stacks(self) -> dict[int, str]:
        """Let every rank write its stacks into its log; say which ones are stopped."""
        odd = {}
        for entry in self._processes:
            if not entry.ended:
                _signal(entry.process, signal.SIGUSR2)
                with contextlib.suppress(psutil.Error):
                    if psutil.Process(entry.process.pid).status() == psutil.STATUS_STOPPED:
                        odd[entry.rank] = "stopped by a signal"
        return odd

    def end(self) -> None:
        """Kill what is left, and forget it."""
        for entry in self._processes:
            if not entry.ended:
                _signal(entry.process, signal.SIGKILL)
        for entry in self._processes:
            entry.process.join(END_SECONDS)
            entry.connection.close()
        self._processes.clear()
        self._beats.close()


def _forked(spec: WorkerSpec, send: Connection, listener: socket.socket | None) -> ForkServerProcess:
    """Fork a rank. A fork server that is ended meanwhile is replaced: no rank is lost, and nobody pressed Ctrl-C."""
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
            time.sleep(_START_PAUSE_SECONDS)  # until the kernel says that it has ended
        else:
            return process
    raise WorkerError(
        f"the process that ranks are forked from ended {_STARTS} times before rank {spec.rank} was there",
        rank=spec.rank,
        host=spec.host,
        remedy="look whether the machine is short of memory or of processes (ulimit -u)",
    )


def preload() -> None:
    """Start the fork server, which imports torch meanwhile.

    It is deaf to what asks a run to end, which is this process's to handle.
    """
    _name_sockets_in_short()
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    with stop_signals_blocked():  # the resource tracker unblocks only the signals that it ignores
        resource_tracker.ensure_running()
    with stop_signals_blocked():
        forkserver.ensure_running()


def _name_sockets_in_short() -> None:
    """Let multiprocessing name its sockets in a folder with a short path, where that of TMPDIR is too long for them.

    Raises: RunError where there is no such folder.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # no public way
    if config.get("tempdir") is not None or len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_FOLDER:
        return
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):  # noqa: S108  # mkdtemp makes a private one in it
        with contextlib.suppress(OSError):
            config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir=folder)
            atexit.register(shutil.rmtree, config["tempdir"], ignore_errors=True)
            return
    raise RunError(
        f"the folder for temporary files has too long a path for a socket ({_LONGEST_FOLDER} bytes at most)",
        where=f"TMPDIR={tempfile.gettempdir()}",
        remedy="set TMPDIR to a folder with a shorter path",
    )


def _signal(process: ForkServerProcess, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, number)
