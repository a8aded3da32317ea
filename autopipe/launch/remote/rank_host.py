"""The ranks of one host under a watcher elsewhere: handles its messages and reports what the ranks do.

Agents and peers share this class; they differ in how they were started, and in how they detect a lost watcher.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopipe.launch.rank.forked import ForkedRanks
from autopipe.launch.rank.heartbeat import Beat
from autopipe.launch.remote import protocol

# a network file system shows a new file to other hosts with a delay
VISIBLE_SECONDS = 30.0
_RETRY_SECONDS = 0.2


class RankHost:
    """The ranks of this host: those of one attempt at a time."""

    def __init__(self, scratch: Path, send: Callable[[protocol.Message], None]) -> None:
        """Hold no rank yet. ``scratch``: a directory for heartbeats and stores. ``send``: sends to the watcher."""
        self._scratch, self._send = scratch, send
        self._ranks: ForkedRanks | None = None
        self._numbers: list[int] = []
        self._beating = threading.Lock()
        self._beaten = 0.0  # when heartbeats were sent last
        self._known: dict[int, Beat] = {}  # those that were sent last
        self.attempt = 0

    def waitable(self) -> list[Any]:
        """Return the objects that become ready when a rank reports something or ends."""
        return self._ranks.waitable() if self._ranks is not None else []

    def handle(self, message: protocol.Message, listener: socket.socket | None = None) -> None:
        """Do what a message requests; ignore messages that do not concern ranks. ``listener``: for rank 0.

        Raises: WorkerError if a rank cannot be started.
        """
        if isinstance(message, protocol.Start):
            self._start(message, listener)
        elif isinstance(message, protocol.Stop) and self._ranks is not None:
            self._ranks.set_stop(message.before, message.agreed)
        elif isinstance(message, protocol.WriteStacks):
            unusual = self._ranks.write_stacks() if self._ranks is not None else {}
            self._send(protocol.Stacks(self.attempt, tuple(unusual.items())))
        elif isinstance(message, protocol.End):
            self.end()
            self._send(protocol.Ended(self.attempt))

    def _start(self, start: protocol.Start, listener: socket.socket | None) -> None:
        with self._beating:
            self.attempt, self._known = start.attempt, {}
        self._numbers = [spec.rank for spec in start.specs]
        if start.job and not _becomes_visible(Path(start.job), start.digest):
            host = socket.gethostname()
            self._refuse(
                f"the run directory is not the same on {host}: {start.job} is not the file that rank 0 wrote",
                "put --run-dir and --work-dir on a file system that every host shares",
            )
            return
        scratch = self._scratch / str(start.attempt)
        scratch.mkdir()
        self._ranks = ranks = ForkedRanks(scratch, start.specs[0].world_size)
        for spec in start.specs:
            store = spec.store or f"file://{scratch / 'store'}"
            own = replace(spec, store=store, heartbeats=str(ranks.heartbeats))
            ranks.start(own, listener if spec.rank == 0 else None)
        self._send(protocol.Started(self.attempt))

    def _refuse(self, what: str, remedy: str) -> None:
        """Report an error as if the first rank had raised it."""
        error = {"kind": "error", "rank": self._numbers[0], "message": what, "where": "", "remedy": remedy}
        error |= {"stage": None, "instruction": "", "microbatch": -1, "traceback": "", "secondary": False}
        self._send(protocol.Event(self.attempt, error | {"time_ns": time.time_ns()}))

    def report(self) -> None:
        """Send the events of the ranks since the last call."""
        for event in self._ranks.poll(0) if self._ranks is not None else ():
            if event["kind"] == "exit":  # its last heartbeat goes first: the periodic one may not have been sent yet
                self.send_beats()
            self._send(protocol.Event(self.attempt, protocol.in_wall_time(event)))

    def send_beats(self, *, now: bool = True) -> None:
        """Send the last heartbeats of the ranks that have moved since the last call.

        ``now=False``: only if a second has passed, or a stop is being agreed. A message without heartbeats is sent,
        too: it shows that this host is alive.
        """
        with self._beating:  # read and sent under one lock: an older heartbeat never follows a newer one
            beats = self._beats()
            agreeing = any(beat.stop >= 0 for beat in beats.values())
            if not now and not agreeing and time.monotonic() - self._beaten < protocol.MOVED_SECONDS:
                return
            self._beaten = time.monotonic()
            moved = (protocol.RankBeat.of(*entry) for entry in beats.items() if self._known.get(entry[0]) != entry[1])
            self._send(protocol.Beats(self.attempt, tuple(moved)))
            self._known = beats

    def _beats(self) -> dict[int, Beat]:
        ranks = self._ranks
        try:
            return {rank: ranks.beat(rank) for rank in self._numbers} if ranks is not None else {}
        except ValueError:  # another thread has just ended the ranks, and closed the heartbeats
            return {}

    def end(self) -> None:
        """Kill the ranks."""
        if self._ranks is not None:
            self._ranks.end()
            self._ranks = None


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _becomes_visible(path: Path, digest: str) -> bool:
    """Return whether a file with that digest is visible on this host, waiting for it if necessary."""
    end = time.monotonic() + VISIBLE_SECONDS
    while True:
        with contextlib.suppress(OSError):
            list(path.parent.iterdir())  # makes a network file system refresh its cache
            if file_digest(path) == digest:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(_RETRY_SECONDS)
