"""The connections of a watcher to the hosts of its ranks: read all, send to all, and report each that is lost once."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autopipe.launch.remote import protocol
from autopipe.launch.remote.stream import MessageStream, StreamError


@dataclass(frozen=True, slots=True)
class Lost:
    """Why a connection has ended, and what the user can do."""

    message: str
    remedy: str


class Peer:
    """The connection to a process that runs ranks on another host. No method raises."""

    offset_ns = 0  # the host's clock minus this one's; hosts of a cluster share a time service

    def __init__(self, host: str, stream: MessageStream) -> None:
        """Take over the stream of a connected process."""
        self.host, self._stream = host, stream
        self._reason = ""

    def readable(self) -> Sequence[Any]:
        """Return the stream, until the process is lost."""
        return [] if self._reason else [self._stream]

    def send(self, message: protocol.Message) -> None:
        """Send a message. A process that does not read within ten seconds is lost."""
        if not self._reason:
            try:
                self._stream.send(message)
            except StreamError as error:
                self.drop(str(error))

    def receive(self) -> Sequence[protocol.Message]:
        """Return the messages that have arrived."""
        if self._reason:
            return []
        try:
            return self._stream.receive()
        except StreamError as error:
            self.drop(str(error))
            return []

    def drop(self, reason: str) -> None:
        """Consider the process lost."""
        self._reason = self._reason or reason
        self._stream.close()

    def lost(self) -> Lost | None:
        """Return why the process is lost, None while it is connected."""
        if not self._reason:
            return None
        return Lost(
            f"its process on {self.host} is gone ({self._reason}): it was killed, or the host does not answer",
            f"check the launcher's output and {self.host} (kernel log, memory, network)",
        )

    def hold(self) -> None:
        """Keep the connection open until this process ends, and use it no more."""
        if not self._reason:
            self._stream.hold()

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()


_FEW = 16
# many hosts send all the time: their messages are read in batches, no more often than this
BATCH_SECONDS = 0.05


class Connections:
    """The connections to some hosts."""

    def __init__(self, connections: Sequence[Peer]) -> None:
        self.all = connections
        self._selector = selectors.DefaultSelector()
        self._watched: dict[Any, int] = {}  # what the selector waits for, and its connection
        self._descriptors: dict[Any, int] = {}  # of these; something that is closed does not know its own
        self._selected = 0.0  # when the selector returned last
        self._reported: set[int] = set()
        self._pending: list[tuple[int, protocol.Message | Lost]] = []

    @property
    def present(self) -> list[int]:
        """The indices of the connections that are not lost."""
        return [index for index in range(len(self.all)) if index not in self._reported]

    def receive(self, timeout: float, also: Sequence[Any] = ()) -> Iterator[tuple[int, protocol.Message | Lost]]:
        """Return (index, message) for what arrives within ``timeout`` seconds; ``Lost`` once for each lost connection.

        ``also``: returns early when one of these is readable.
        """
        pending, self._pending = self._pending, []
        yield from pending
        present = [(index, self.all[index]) for index in self.present]
        silent = self._watch(present, also)
        ready = self._select(0 if pending else timeout, len(present)) | silent
        for index, connection in present:
            if index in ready:
                for message in connection.receive():
                    yield index, message
            lost = connection.lost()
            if lost is not None:
                self._reported.add(index)
                yield index, lost

    def _watch(self, present: Sequence[tuple[int, Peer]], also: Sequence[Any]) -> set[int]:
        """Let the selector wait for what is due now. Returns: the connections that have nothing to wait for."""
        due: dict[Any, int] = dict.fromkeys(also, -1)
        silent = set()
        for index, connection in present:
            readable = connection.readable()
            due.update((thing, index) for thing in readable)
            if not readable:
                silent.add(index)
        if due != self._watched:
            # the closed ones first: a new one may have the descriptor of a closed one
            for thing in [thing for thing, index in self._watched.items() if due.get(thing) != index]:
                self._selector.unregister(self._descriptors.pop(thing))
                del self._watched[thing]
            for thing, index in due.items():
                if thing not in self._watched:
                    self._descriptors[thing] = self._selector.register(thing, selectors.EVENT_READ, index).fd
                    self._watched[thing] = index
        return silent

    def _select(self, timeout: float, num_present: int) -> set[int]:
        """Wait until something is ready. Returns: the connections that are."""
        if not self._watched:
            return set()
        if num_present > _FEW and timeout > 0:
            pause = min(timeout, BATCH_SECONDS - (time.monotonic() - self._selected))
            if pause > 0:
                time.sleep(pause)
                timeout -= pause
        ready = {key.data for key, _ in self._selector.select(timeout)}
        self._selected = time.monotonic()
        return ready

    def keep(self, index: int, message: protocol.Message | Lost) -> None:
        """Return a message again from the next ``receive``."""
        self._pending.append((index, message))

    def send(self, message: protocol.Message) -> None:
        """Send a message to every host that is not lost."""
        for index in self.present:
            self.all[index].send(message)
