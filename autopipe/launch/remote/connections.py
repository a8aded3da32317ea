"""The connections of a watcher to the hosts of its ranks: read all, send to all, and report each that is lost once."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from autopipe.errors import RunError
from autopipe.launch.remote import protocol

A = TypeVar("A", bound=protocol.Message)


@dataclass(frozen=True, slots=True)
class Lost:
    """Why a connection has ended, and what the user can do."""

    message: str
    remedy: str


class Connection(Protocol):
    """A connection to the process that runs ranks on another host. No method blocks for long, and none raises."""

    host: str
    offset_ns: int  # the host's clock minus this one's

    def readable(self) -> Sequence[Any]:
        """Return what to wait for until it is readable."""

    def writable(self) -> Sequence[Any]:
        """Return what to wait for until it is writable: nothing if every message was sent."""

    def send(self, message: protocol.Message) -> None:
        """Send a message, now or in a later ``receive``."""

    def receive(self) -> Sequence[protocol.Message]:
        """Return the messages that have arrived."""

    def lost(self) -> Lost | None:
        """Return why nothing more will arrive, None while the connection works."""

    def drop(self, reason: str) -> None:
        """Consider the connection lost."""


_FEW = 16
# many hosts send all the time: their messages are read in batches, no more often than this
BATCH_SECONDS = 0.05


class Connections:
    """The connections to some hosts."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.all = connections
        self._selector = selectors.DefaultSelector()
        self._watched: dict[Any, tuple[int, int]] = {}  # what the selector waits for: its events, and the connection
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

    def _watch(self, present: Sequence[tuple[int, Connection]], also: Sequence[Any]) -> set[int]:
        """Let the selector wait for what is due now. Returns: the connections that have nothing to wait for."""
        due: dict[Any, tuple[int, int]] = dict.fromkeys(also, (selectors.EVENT_READ, -1))
        silent = set()
        for index, connection in present:
            readable, writable = connection.readable(), connection.writable()
            due.update((thing, (selectors.EVENT_READ, index)) for thing in readable)
            due.update((thing, (selectors.EVENT_WRITE, index)) for thing in writable)
            if not readable and not writable:
                silent.add(index)
        if due != self._watched:
            # the closed ones first: a new one may have the descriptor of a closed one
            for thing in [thing for thing, entry in self._watched.items() if due.get(thing) != entry]:
                self._selector.unregister(self._descriptors.pop(thing))
                del self._watched[thing]
            for thing, (events, index) in due.items():
                if thing not in self._watched:
                    self._descriptors[thing] = self._selector.register(thing, events, index).fd
                    self._watched[thing] = events, index
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

    def ask(
        self, questions: Mapping[int, protocol.Message], answer: type[A], seconds: float = protocol.ANSWER_SECONDS
    ) -> dict[int, A]:
        """Send a question to each of some hosts and return their answers, by index.

        Raises: RunError for the first host that refuses, is lost, or does not answer in time.
        """
        for index, question in questions.items():
            self.all[index].send(question)
        answers: dict[int, A] = {}
        others: list[tuple[int, protocol.Message]] = []
        end = time.monotonic() + seconds
        while len(answers) < len(questions):
            for index, message in self.receive(0.1):
                host = self.all[index].host
                if isinstance(message, answer) and index in questions:
                    answers[index] = message
                elif isinstance(message, protocol.Refused):
                    raise RunError(message.what, where=message.where or f"host {host}", remedy=message.remedy)
                elif isinstance(message, Lost):
                    raise RunError(message.message, where=f"host {host}", remedy=message.remedy)
                elif not isinstance(message, protocol.Beats):
                    others.append((index, message))
            if time.monotonic() > end:
                late = [self.all[index].host for index in questions if index not in answers]
                raise RunError(f"no answer from {', '.join(late)} within {seconds:.0f} s", remedy="check these hosts")
        self._pending += others
        return answers
