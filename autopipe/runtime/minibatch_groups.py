"""``Windows``: groups of minibatches that run together, one each, or several if the pipeline stays full between them.

A run can be saved, evaluated and stopped where the pipeline drains. The place does not change the result: the formula
of docs/semantics.md decides which weight version a minibatch uses, also after a drain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autopipe.ir.plan import Plan
from autopipe.runtime.batches.readers import Minibatch, Reader
from autopipe.runtime.batches.source import Place
from autopipe.runtime.events import Reporter
from autopipe.runtime.job import Job
from autopipe.schedules import REGISTRY

# an asynchronous schedule drains after this many minibatches, earlier if they take longer than SECONDS
MOST, LEAST, SECONDS = 32, 4, 10.0


@dataclass(frozen=True, slots=True)
class Window:
    """One or more minibatches, from step ``first`` on."""

    first: int
    minibatches: list[Minibatch]
    # where the data continues before them
    before: Place

    @property
    def place(self) -> Place:
        """Where the data continues after them."""
        return self.minibatches[-1].place


@dataclass(slots=True)
class Windows:
    """The windows of a job, the same on every rank."""

    job: Job
    plan: Plan
    reader: Reader
    reporter: Reporter
    # whether a minibatch is audited
    audited: Callable[[int], bool]
    # the run has stopped on request
    stopped: bool = False

    def walk(self, step: int, place: Place) -> Iterator[Window]:
        """Yield windows from ``step`` and ``place`` on until the job is done or stops on request.

        Raises: RunError if the data ends before the steps do, or differs from what was read before ``place``.
        """
        begun = False
        while not self._done(step, place):
            length = self._length(step)
            self.stopped = not self.reporter.may_begin(step, step + length)
            if self.stopped:
                return
            if not begun:
                self.reader.seek(place, compare=self.job.same_data)
                begun = True
            minibatches = self.reader.read(step, length)
            if not minibatches:
                return
            if self.job.steps and minibatches[-1].place.epoch > place.epoch:
                self.reporter.event("round", epoch=minibatches[-1].place.epoch, minibatches=step)
            yield Window(step, minibatches, place)
            step, place = step + len(minibatches), minibatches[-1].place

    def _length(self, step: int) -> int:
        length = 1 if REGISTRY[self.plan.schedule].synchronous else self._full()
        if self.audited(step):
            return 1  # an audit compares the state before and after one minibatch
        length = next((count for count in range(1, length) if self.audited(step + count)), length)
        for every in (self.job.checkpoint_every, self.job.evaluate_every):
            if every:
                length = min(length, every - step % every)
        return min(length, self.job.steps - step) if self.job.steps else length

    def _full(self) -> int:
        """Return how many minibatches run before the pipeline drains."""
        seconds = self.plan.predicted.step_seconds
        return max(LEAST, min(MOST, int(SECONDS / seconds))) if seconds else MOST

    def _done(self, step: int, place: Place) -> bool:
        if self.job.steps and step >= self.job.steps:
            return True
        return bool(self.job.epochs) and place.epoch >= self.job.epochs
