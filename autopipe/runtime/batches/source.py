"""``Source``: the minibatches of a job in order, as one process reads them, and the place where a run goes on.

A checkpoint keeps the epoch, how many minibatches of it were used, and a digest of these. A run that goes on reads them
again and compares. Data may have state over epochs (a generator at module level, a loader that counts its epochs),
which a fresh process does not have; so the epochs before are replayed first, as far as ``Job.replay`` says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from autopipe.draws import exclusive
from autopipe.errors import RunError, counted
from autopipe.runtime.events import Reporter
from autopipe.workload.batches.digests import chained, digest_of
from autopipe.workload.batches.items import kept

REPLAY_SECONDS = 60.0
"""How long earlier epochs are read again in full, where the digest does not ask for it."""
OTHER_DATA = "other-data"
"""The event of a rank that did not find what a checkpoint's run had read."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where data goes on: ``position`` minibatches of ``epoch`` were used. ``digest``: of these, "" where not known."""

    epoch: int = 0
    position: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Taken:
    """A minibatch that was read. ``digest``: of it alone; ``place``: where the data goes on behind it."""

    item: Any
    digest: bytes
    place: Place


@dataclass(slots=True)
class Source:
    """One process's way through the data. ``open``: epoch -> its minibatches.

    ``name``: of the model, for errors. ``epochs``, ``steps``: of the job, 0 for no limit. ``replay``: as in ``Job``.
    ``speaks``: reports notes; one of the processes that read does.
    """

    open: Callable[[int], Iterator[Any]]
    name: str
    reporter: Reporter
    epochs: int = 0
    steps: int = 0
    replay: str = "some"
    speaks: bool = False
    place: Place = field(default_factory=Place)
    _iterator: Iterator[Any] | None = None
    _least: int = 1

    def seek(self, place: Place, *, compare: bool = True) -> None:
        """Go to the place where a run was interrupted, over what comes before it. ``compare``: with its digest.

        Raises: RunError where the data gives fewer minibatches than before, or other ones.
        """
        deadline = time.monotonic() + REPLAY_SECONDS if self.replay == "some" else math.inf
        whole = True
        for epoch in range(place.epoch):
            self.reporter.at(f"replaying epoch {epoch} of {place.epoch}", waiting=False)
            whole &= self._replay(epoch, deadline)
        if not whole and self.speaks:
            text = (
                f"earlier epochs were read again for {REPLAY_SECONDS:.0f} s, and of the others the first minibatch: "
                "data that counts its minibatches goes on from another count"
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
        self.place = Place(place.epoch, place.position, digest.hex())
        if compare and place.digest and place.digest != self.place.digest:
            self.reporter.event(
                OTHER_DATA, epoch=place.epoch, position=place.position, replay="all" if whole else "some"
            )
            raise RunError(
                f"the data is not that of the interrupted run: the first {counted(place.position, 'minibatch')} of "
                f"epoch {place.epoch} are others"
            )

    def read(self, step: int, most: int) -> list[Taken]:
        """Return the next minibatches, the first for step ``step``: fewer than ``most`` at the end of the last epoch.

        Several at a time are copies: data may fill the memory of a minibatch with the next one.

        Raises: RunError where an epoch gives nothing.
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
            taken.append(Taken(kept(item) if most > 1 else item, digest, self.place))
        return taken

    @property
    def _ended(self) -> bool:
        return bool(self.epochs) and self.place.epoch >= self.epochs

    def _next(self) -> Any:
        with exclusive():
            if self._iterator is None:
                self._iterator = self.open(self.place.epoch)
            return next(self._iterator, None)

    def _replay(self, epoch: int, deadline: float) -> bool:
        """Read an earlier epoch again, past the deadline its first minibatch only. Return whether it was read whole."""
        with exclusive():
            minibatches = self.open(epoch)
        while True:
            with exclusive():
                item = next(minibatches, None)
            if item is None:
                return True
            if time.monotonic() > deadline:
                return False
            self.reporter.at(f"replaying epoch {epoch}", waiting=False)

    def _refuse_dry(self, given: int, before: str, step: int = -1) -> None:
        of = f" of {self.steps}" if self.steps else ""
        raise RunError(
            f"the data of {self.name} ran dry: epoch {self.place.epoch} gave {counted(given, 'minibatch')}{before}",
            where=f"after step {step}{of}" if step >= 0 else "",
            remedy="let data return an iterable that can be iterated again, not a used-up generator; or fewer --steps",
        )
