"""The ranks of one host under a watcher elsewhere: handles its messages and reports what the ranks do.

A rank that cannot be started is reported as an error of that rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopipe.errors import AutopipeError
from autopipe.launch.rank.forked import ForkedRanks
from autopipe.launch.rank.heartbeat import Beat
from autopipe.launch.remote import network, protocol

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
        self._listeners: list[socket.socket] = []
        self._beaten = 0.0  # when heartbeats were sent last
        self._known: dict[int, Beat] = {}  # those that were sent last
        self.attempt = 0

    @property
    def has_ranks(self) -> bool:
        """Whether ranks were started here and not ended since; their processes may have exited."""
        return self._ranks is not None

    def waitable(self) -> list[Any]:
        """Return the objects that become ready when a rank reports something or ends."""
        return self._ranks.waitable() if self._ranks is not None else []

    def listen(self, address: str) -> int:
        """Listen on an address until the ranks start, and return the port. Rank 0 gets the last such socket.

        Raises: RunError if the address cannot be used.
        """
        self._listeners.append(network.listen(address))
        return int(self._listeners[-1].getsockname()[1])

    def handle(self, message: protocol.Message) -> None:
        """Do what a message requests; ignore messages that do not concern ranks."""
        if isinstance(message, protocol.Start):
            self._start(message)
        elif isinstance(message, protocol.Stop) and self._ranks is not None:
            self._ranks.set_stop(message.before, message.agreed)
        elif isinstance(message, protocol.WriteStacks):
            unusual = self._ranks.write_stacks() if self._ranks is not None else {}
            self._send(protocol.Stacks(self.attempt, tuple(unusual.items())))
        elif isinstance(message, protocol.End):
            self.end()
            self._send(protocol.Ended(self.attempt))

    def _start(self, start: protocol.Start) -> None:
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
        try:
            scratch.mkdir()
            self._ranks = ranks = ForkedRanks(scratch, start.specs[0].world_size)
            for spec in start.specs:
                store = spec.store or f"file://{scratch / 'store'}"
                own = replace(spec, store=store, heartbeats=str(ranks.heartbeats))
                ranks.start(own, self._listeners[-1] if self._listeners and spec.rank == 0 else None)
        except AutopipeError as error:
            self._refuse(error.what, error.remedy)
        except OSError as error:
            self._refuse(str(error), "check the disk and the limits (ulimit) of this host")
        finally:
            while self._listeners:
                self._listeners.pop().close()

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
        ranks = self._ranks
        beats = {rank: ranks.beat(rank) for rank in self._numbers} if ranks is not None else {}
        agreeing = any(beat.stop >= 0 for beat in beats.values())
        if not now and not agreeing and time.monotonic() - self._beaten < protocol.MOVED_SECONDS:
            return
        self._beaten = time.monotonic()
        moved = (protocol.RankBeat.of(*entry) for entry in beats.items() if self._known.get(entry[0]) != entry[1])
        self._send(protocol.Beats(self.attempt, tuple(moved)))
        self._known = beats

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
