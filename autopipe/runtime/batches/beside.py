"""The data of a training, read in a process beside rank 0, which also runs the Python of forward and loss.

::

    read_beside (``reading_process``)                              rank 0: Beside --> OneReads
      Source -> item -> GraphVariants: its recordings -> Guard
                    <-- {"do": "seek", ...}, {"do": "until", "step": 7}, {"do": "evaluate", ...}, "compare", "stop"
                    --> "began" "sought" "minibatch" "compared" "end"; "event", "at" of a Reporter; an error, its end

It reads at most ``AHEAD`` minibatches ahead, never past an evaluation, and runs the user's Python in the order of plain
training. A minibatch arrives after it was compared; but the first one, if the model does not vary, is compared after
its step, so that the first step does not wait for that. Its tensors are in memory that both processes map.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from autopipe.errors import InternalError, RunError
from autopipe.runtime.batches.shared import shared
from autopipe.runtime.batches.source import Place, Source, Taken
from autopipe.runtime.events import Reporter
from autopipe.runtime.job import Job
from autopipe.trace.tape.guard import not_compared
from autopipe.workload import Workload

AHEAD = 3
"""Minibatches that are read before rank 0 needs them."""
DOING = "reading the data and running the model's Python beside rank 0"
INSTEAD = "if the model's Python does the same for each batch, --data-reader one reads in rank 0, and compares nothing"
_WAIT_SECONDS = 1.0


class Telling(Protocol):
    """The process, from the side of rank 0: a ``workers.worker.Worker``."""

    ended: bool
    error: Exception | None

    def receive(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the messages that it has sent."""

    def tell(self, **fields: Any) -> None:
        """Send a message."""

    def wait(self, seconds: float | None = None) -> None:
        """Wait for a message."""


@dataclass(slots=True)
class Beside:
    """What rank 0 knows of the process."""

    process: Telling
    job: Job
    reporter: Reporter
    waits: Callable[[], None] = lambda: None
    # why it does not read; "" if it does; None: not known yet
    why_not: str | None = None
    # rank 0 reads the evaluation data
    leaves_evaluation: bool = False
    _until: int = 0

    @property
    def reads(self) -> bool:
        """Whether it reads the data. Says why not."""
        if self.why_not is None:
            self.why_not = self.message("began")["why"]
            if self.why_not:
                self.leave(self.why_not)
        return not self.why_not

    def leave(self, why: str) -> None:
        """Let rank 0 read from now on."""
        self.why_not = why
        self.process.tell(do="stop")
        self.reporter.event("note", text=not_compared(why))

    def message(self, *kinds: str) -> dict[str, Any]:
        """Return the next message of one of some kinds, with its kind. Raises: the error that ended the process."""
        while True:
            for kind, fields in self.process.receive():
                if kind == "at":
                    self.reporter.at(fields["text"], waiting=False)
                elif kind == "event":
                    self.reporter.event(fields.pop("name"), **fields)
                elif kind in kinds:
                    return {"kind": kind, **fields}
                else:
                    raise InternalError(f"the process beside rank 0 has sent {kind!r} in place of {kinds}")
            if self.process.ended:
                raise self.process.error or InternalError("the process beside rank 0 has ended before the training")
            self.waits()
            self.process.wait(_WAIT_SECONDS)

    def may_read(self, step: int) -> None:
        """Let it read ahead of the minibatch of a step."""
        every, steps = self.job.evaluate_every, self.job.steps
        until = step + 1 + AHEAD
        if every:  # evaluation data may depend on what data did before, and the other way round
            until = min(until, step + every - step % every)
        until = min(until, steps) if steps else until
        if until > self._until:
            self._until = until
            self.process.tell(do="until", first=step, step=until)


@dataclass(slots=True)
class BesideSource:
    """Minibatches that the process reads, in place of those of a ``Source``."""

    beside: Beside
    # reads if the process cannot
    own: Source
    workload: Workload
    training: bool = True
    # called while rank 0 waits for data
    reading: Callable[[], None] = lambda: None
    _num_read: int = 0
    # the latest minibatch was compared
    _is_compared: bool = True

    @property
    def _is_used(self) -> bool:
        self.own.reading = self.beside.waits = self.reading
        return self.beside.reads and (self.training or not self.beside.leaves_evaluation)

    def seek(self, place: Place, *, compare: bool = True) -> None:
        """As ``Source.seek``."""
        if not self._is_used:
            return self.own.seek(place, compare=compare)
        self.own.place = place
        self.beside.process.tell(do="seek", place=dataclasses.asdict(place), compare=compare)
        self.beside.message("sought")
        return None

    def read(self, step: int, most: int) -> list[Taken]:
        """As ``Source.read``. Raises: also the error of the comparison, or that of the end of the process."""
        if not self._is_used:
            return self.own.read(step, most)
        taken: list[Taken] = []
        self.own.reporter.at("reading data", waiting=False)
        while len(taken) < most:
            self.compared()
            if self.training:
                self.beside.may_read(step + len(taken))
            else:
                self.beside.process.tell(do="evaluate", first=not self._num_read)
            answer = self.beside.message("minibatch", "end")
            if answer["kind"] == "end":
                break
            if answer["why"]:
                return self._refused(answer["why"], step, most)
            if answer["dimensions"] is not None:
                self.workload.adopt_dimensions(answer["dimensions"])
            item = shared(answer["tree"], answer["tensors"], answer["memory"])
            place = Place(**answer["place"])
            each = {name: tuple(answer[name]) for name in ("recordings", "numbers", "followed")}
            taken.append(Taken(item, bytes.fromhex(answer["digest"]), place, **each))
            self._num_read += 1
            self._is_compared = answer["compared"]
        return taken

    def compared(self) -> None:
        """Let the process compare a minibatch that was not compared. Raises: the error of the comparison."""
        if not self._is_compared:
            self._is_compared = True
            self.beside.process.tell(do="compare")
            self.beside.message("compared")

    def _refused(self, why: str, step: int, most: int) -> list[Taken]:
        """Read in rank 0 if the first minibatch cannot be sent. Raises: RunError if it is a later one."""
        if self._num_read:
            raise RunError(f"minibatch {step + 1} cannot be sent to rank 0: {why}", remedy=INSTEAD)
        if not self.training:
            self.beside.leaves_evaluation = True
            return self.own.read(step, most)
        self.beside.leave(why)
        place, self.own.place = self.own.place, Place()
        self.own.seek(place, compare=False)  # the process has compared it
        return self.own.read(step, most)
