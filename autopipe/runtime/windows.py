"""Which minibatches are run together: one at a time, or several where the pipeline is to stay full between them.

Where the pipeline drains, a run can be saved, evaluated and stopped; see the definition of the schedules on why it
changes nothing where that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autopipe.draws import exclusive
from autopipe.errors import RunError, counted
from autopipe.ir.plan import Plan
from autopipe.runtime.events import Reporter
from autopipe.runtime.job import Job
from autopipe.schedules import REGISTRY
from autopipe.workload import Workload

# an asynchronous schedule keeps its pipeline full for this many minibatches, fewer where they take long, then drains
MOST, LEAST, SECONDS = 32, 4, 10.0


@dataclass(frozen=True, slots=True)
class Window:
    """Minibatches from ``first`` on. ``epoch``, ``position``: where the data goes on after them."""

    first: int
    items: list[Any]
    epoch: int
    position: int


@dataclass(slots=True)
class Windows:
    """The minibatches of a job, the same on every rank. ``stopped``: the run was asked to stop, and did.

    ``items``: epoch -> minibatches, where they are not to come from the workload's own data.
    """

    job: Job
    plan: Plan
    workload: Workload
    reporter: Reporter
    items: Callable[[int], Iterator[Any]] | None = None
    stopped: bool = False

    def walk(self, step: int, epoch: int, position: int) -> Iterator[Window]:
        """Yield windows until the job is done, or is to stop.

        Raises: RunError where the data ends before the steps do.
        """
        items: list[Any] = []
        length = self._length(step)
        if self._done(step, epoch) or not self._may_begin(step, length):
            return
        while not self._done(step, epoch):
            found = 0
            source = self._source(epoch)
            while not self._done(step + len(items), epoch):
                self.reporter.at("reading data", waiting=False)
                with exclusive():
                    item = next(source, None)
                if item is None:
                    break
                found += 1
                if found <= position:
                    continue
                items.append(item)
                if len(items) == length:
                    yield Window(step, items, epoch, found)
                    step, items = step + len(items), []
                    length = self._length(step)
                    if not self._done(step, epoch) and not self._may_begin(step, length):
                        return
            else:
                break
            self._refuse_dry(step, epoch, found, position)
            epoch, position = epoch + 1, 0
        if items:
            yield Window(step, items, epoch, position)

    def _refuse_dry(self, step: int, epoch: int, found: int, position: int) -> None:
        """Raises: RunError where an epoch gave nothing, or less than it did when the checkpoint was made."""
        if found >= max(position, 1):
            return
        before = f"; it had given {position} when the checkpoint was made" if position else ""
        of = f" of {self.job.steps}" if self.job.steps else ""
        raise RunError(
            f"the data of {self.workload.name} ran dry: epoch {epoch} gave {counted(found, 'minibatch')}{before}",
            where=f"after step {step}{of}",
            remedy="let data return an iterable that can be iterated again, not a used-up generator; or fewer --steps",
        )

    def _length(self, step: int) -> int:
        length = 1 if REGISTRY[self.plan.schedule].synchronous else self._full()
        for every in (self.job.checkpoint_every, self.job.evaluate_every):
            if every:
                length = min(length, every - step % every)
        return min(length, self.job.steps - step) if self.job.steps else length

    def _full(self) -> int:
        """Return how many minibatches run before the pipeline drains."""
        seconds = self.plan.predicted.step_seconds
        return max(LEAST, min(MOST, int(SECONDS / seconds))) if seconds else MOST

    def _may_begin(self, step: int, length: int) -> bool:
        self.stopped = not self.reporter.may_begin(step, step + length)
        return not self.stopped

    def _done(self, step: int, epoch: int) -> bool:
        if self.job.steps and step >= self.job.steps:
            return True
        return bool(self.job.epochs) and epoch >= self.job.epochs

    def _source(self, epoch: int) -> Iterator[Any]:
        if self.items is not None:
            return self.items(epoch)
        return self.workload.items(self.job.batch_size or None, epoch=epoch)
