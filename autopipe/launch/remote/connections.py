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


class Connections:
    """The connections to some hosts."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.all = connections
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
        with selectors.DefaultSelector() as selector:
            for thing in also:
                selector.register(thing, selectors.EVENT_READ)
            for _, connection in present:
                for thing in connection.readable():
                    selector.register(thing, selectors.EVENT_READ)
                for thing in connection.writable():
                    selector.register(thing, selectors.EVENT_WRITE)
            if selector.get_map():
                selector.select(0 if pending else timeout)
        for index, connection in present:
            for message in connection.receive():
                yield index, message
            lost = connection.lost()
            if lost is not None:
                self._reported.add(index)
                yield index, lost

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
