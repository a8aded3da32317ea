"""``Source``: the minibatches of a job in order, read by one process, with the place where a run resumes.

A checkpoint stores the epoch, the number of its minibatches that were used, and a digest of these. A resumed run reads
them again and compares. Data may have state over epochs (a generator at module level, a loader that counts epochs),
which a new process lacks. So earlier epochs are replayed first, as far as ``Job.replay`` says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopipe.draws import exclusive
from autopipe.errors import RunError, counted
from autopipe.runtime.events import Reporter
from autopipe.workload.batches.digests import chained, digest_of
from autopipe.workload.batches.items import kept

REPLAY_SECONDS = 60.0
"""How long earlier epochs are replayed in full, if the digest does not require more."""
OTHER_DATA = "other-data"
"""The event of a rank whose data differs from what the run of the checkpoint had read."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place in the data at which the next minibatch is read."""

    epoch: int = 0
    # how many minibatches of the epoch were used
    position: int = 0
    # of these minibatches; "" if unknown
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Taken:
    """A minibatch that was read."""

    item: Any
    # of this minibatch alone
    digest: bytes
    # where the data continues after it
    place: Place
    # recordings that were made for it, or for one before it, in a process beside rank 0
    recordings: tuple[str, ...] = ()
    # of each microbatch: the numbers that travel with it, by input of the graph
    numbers: tuple[Mapping[str, Any], ...] = ()
    # of each microbatch of a model that varies: the recording that does what its Python did
    followed: tuple[str, ...] = ()


@dataclass(slots=True)
class Source:
    """The data as one process reads it."""

    # epoch -> its minibatches
    open: Callable[[int], Iterator[Any]]
    # of the model, for errors
    name: str
    reporter: Reporter
    # of the job; 0: no limit
    epochs: int = 0
    steps: int = 0
    # as in ``Job``
    replay: str = "some"
    # nothing can be read a second time
    once: bool = False
    # report notes; set for one of the processes that read
    speaks: bool = False
    # called before each minibatch is read
    reading: Callable[[], None] = lambda: None
    # called with each minibatch that was trained before
    passed: Callable[[Any], None] = lambda item: None
    place: Place = field(default_factory=Place)
    _iterator: Iterator[Any] | None = None
    # how many minibatches of the epoch the data has given
    _given: int = 0
    _least: int = 1

    def seek(self, place: Place, *, compare: bool = True) -> None:
        """Read up to the place where a run was interrupted. ``compare``: compare the digest.

        Raises: RunError if the data gives fewer minibatches than before, or different ones.
        """
        if self.once:  # what follows are the minibatches after the checkpoint, which no digest verifies
            self.place, self._least = place, max(place.position, 1)
            return
        deadline = time.monotonic() + REPLAY_SECONDS if self.replay == "some" else math.inf
        complete = True
        for epoch in range(place.epoch):
            self.reporter.at(f"replaying epoch {epoch} of {place.epoch}", waiting=False)
            complete &= self._replay(epoch, deadline)
        if not complete and self.speaks:
            text = (
                f"earlier epochs were replayed for {REPLAY_SECONDS:.0f} s, and only the first minibatch of the rest: "
                "data that counts its minibatches continues from another count"
            )
            self.reporter.event("note", text=text)
        self.place, self._least = Place(place.epoch), max(place.position, 1)
        digest = b""
        for position in range(place.position):
            self.reporter.at(f"reading up to minibatch {place.position} of epoch {place.epoch}", waiting=False)
            item = self._next()
            if item is None:
                self._refuse_dry(position, f"; it had given {place.position} when the checkpoint was made")
            digest = chained(digest, digest_of(item))
            self.passed(item)
        self.place = Place(place.epoch, place.position, digest.hex())
        if compare and place.digest and place.digest != self.place.digest:
            replay, read = "all" if complete else "some", self.place.digest
            self.reporter.event(OTHER_DATA, epoch=place.epoch, position=place.position, replay=replay, digest=read)
            raise RunError(
                f"the data is not that of the interrupted run: the first {counted(place.position, 'minibatch')} of "
                f"epoch {place.epoch} differ"
            )

    def read(self, step: int, most: int) -> list[Taken]:
        """Return the next minibatches, the first for step ``step``: fewer than ``most`` at the end of the last epoch.

        If several are read, they are copies: data may overwrite the memory of a minibatch with the next one.

        Raises: RunError if an epoch gives no minibatches.
        """
        taken: list[Taken] = []
        while len(taken) < most and not self._ended:
            self.reporter.at("reading data", waiting=False)
            item = self._next()
            if item is None:
                if self.place.position < self._least:
                    self._refuse_dry(self.place.position, "", step + len(taken))
                self.place, self._iterator, self._least = Place(self.place.epoch + 1), None, 1
                continue
            digest = digest_of(item)
            chain = chained(bytes.fromhex(self.place.digest), digest).hex()
            self.place = Place(self.place.epoch, self.place.position + 1, chain)
            self._refuse_unused(step + len(taken))
            taken.append(Taken(kept(item) if most > 1 else item, digest, self.place))
        return taken

    @property
    def _ended(self) -> bool:
        return bool(self.epochs) and self.place.epoch >= self.epochs

    def _next(self) -> Any:
        self.reading()
        with exclusive():
            if self._iterator is None:
                self._iterator = self._counted(self.open(self.place.epoch))
            return next(self._iterator, None)

    def _counted(self, minibatches: Iterator[Any]) -> Iterator[Any]:
        self._given = self.place.position
        for item in minibatches:
            self._given += 1
            yield item

    def _refuse_unused(self, step: int) -> None:
        """Refuse to train on if the data gave more or fewer minibatches than were used. Raises: RunError."""
        epoch, position = self.place.epoch, self.place.position
        if self._given != position:
            raise RunError(
                f"epoch {epoch} of the data has given {counted(self._given, 'minibatch')}, and the run used {position}",
                where=f"step {step + 1}",
                remedy="resume from a checkpoint before that step (--resume STEP); if it happens again, report it",
            )

    def _replay(self, epoch: int, deadline: float) -> bool:
        """Replay an earlier epoch, after the deadline only its first minibatch. Return whether it was complete."""
        with exclusive():
            minibatches = self.open(epoch)
        while True:
            self.reading()
            with exclusive():
                item = next(minibatches, None)
            if item is None:
                return True
            if time.monotonic() > deadline:
                return False
            self.passed(item)
            self.reporter.at(f"replaying epoch {epoch}", waiting=False)

    def _refuse_dry(self, given: int, before: str, step: int = -1) -> None:
        of = f" of {self.steps}" if self.steps else ""
        raise RunError(
            f"the data of {self.name} ended early: epoch {self.place.epoch} had {counted(given, 'minibatch')}{before}",
            where=f"after step {step}{of}" if step >= 0 else "",
            remedy="let data return an iterable that can be iterated again, not a generator; or use fewer --steps",
        )
