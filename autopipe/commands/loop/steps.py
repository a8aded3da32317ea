"""``Steps``: training as an iterator, one optimizer step for each minibatch of an iterable.

::

    the caller's thread:  batch -> BatchServer        wait for the loss -> yield it -> the loop's body -> next batch
                                     |                     ^
    a thread of its own:  train -> ranks (rank 0 reads) ---+ events
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from autopipe.commands.loop.server import BatchServer, message_of
from autopipe.commands.settings import Events, StopEvent, ignore_event
from autopipe.errors import RunError
from autopipe.report.results import TrainResult
from autopipe.workload.batches import items

_EMPTY = object()


class StepLoss(float):
    """The loss of an optimizer step, as a number."""

    __slots__ = ("learning_rate", "step")

    #: The number of the step, counted from 0 over all runs that were resumed.
    step: int
    #: Of the first parameter group; None if the optimizer has none.
    learning_rate: float | None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> StepLoss:
        """Return the loss of an event."""
        loss = cls(fields["loss"])
        loss.step, loss.learning_rate = fields["step"], fields.get("learning_rate")
        return loss


class Train(Protocol):
    """Trains on the minibatches that a socket gives."""

    def __call__(self, first: Any, address: str, on_event: Events, stop: StopEvent) -> TrainResult:
        """Train. ``first``: the first minibatch. Raises: as ``Pipeline.train``."""


class Steps:
    """The steps of one training. Iterate it once.

    The training ends when the iterable ends, at a ``break``, and at an exception in the loop, each with a checkpoint.
    """

    def __init__(self, batches: Iterable[Any], train: Train, on_event: Events | None) -> None:
        self._batches, self._train, self._on_event = batches, train, on_event or ignore_event
        self._losses: queue.SimpleQueue[StepLoss | None] = queue.SimpleQueue()  # None: the training has ended
        self._stop = threading.Event()
        self._result: TrainResult | None = None
        self._error: BaseException | None = None
        self._begun = False

    @property
    def result(self) -> TrainResult:
        """The result of the training, after the loop. Raises: its error; RunError before the end of the loop."""
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise RunError("these steps have no result yet", remedy="read it after the loop")
        return self._result

    def __iter__(self) -> Iterator[StepLoss]:
        """Train on one minibatch after the other, and yield the loss of each step.

        Raises: the errors of ``Pipeline.train``; ModelFileError for a minibatch that cannot be sent to the ranks.
        """
        if self._begun:
            raise RunError("these steps were iterated before", remedy="call steps again, with resume=True to continue")
        self._begun = True
        return self._steps()

    def _steps(self) -> Iterator[StepLoss]:
        batches = iter(self._batches)
        first = next(batches, _EMPTY)
        if first is _EMPTY:
            raise RunError("batches gave no minibatch", remedy="check the iterable; an iterator can be read only once")
        item, message = _checked(first, 0)
        server = BatchServer()
        server.put(message)
        thread = threading.Thread(target=self._run, args=(item, server.address), name="autopipe-loop", daemon=True)
        thread.start()
        with self._ending(server, thread):
            for count in range(1, sys.maxsize):
                loss = self._losses.get()
                if loss is None:  # an error, or a hook has ended the training
                    return
                yield loss
                batch = next(batches, _EMPTY)
                if batch is _EMPTY:
                    return
                server.put(_checked(batch, count)[1])

    @contextlib.contextmanager
    def _ending(self, server: BatchServer, thread: threading.Thread) -> Iterator[None]:
        """End the training behind the block. Raises: its error, unless the block raised one itself."""

        def end() -> None:
            server.end()
            thread.join()

        atexit.register(end)  # for an iterator that is neither used up nor closed
        try:
            yield
        except GeneratorExit:
            end()
            if self._error is not None:
                raise self._error from None
            raise
        except BaseException:
            self._stop.set()
            end()
            raise
        else:
            end()
        finally:
            atexit.unregister(end)
            server.close()
        if self._error is not None:
            raise self._error

    def _run(self, first: Any, address: str) -> None:
        try:
            self._result = self._train(first, address, self._take, self._stop)
        except BaseException as error:
            self._error = error
        finally:
            self._losses.put(None)

    def _take(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._on_event(kind, fields)
        if kind == "step":
            self._losses.put(StepLoss.of(fields))


def _checked(batch: Any, index: int) -> tuple[Any, bytes]:
    """Return a minibatch as an item, and as a message. Raises: ModelFileError if it is neither a pair nor a dict."""
    item = items.normalised(batch, "batches")
    return item, message_of(item, f"minibatch {index} of the loop")
