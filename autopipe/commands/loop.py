"""``Steps``: training as an iterator, one optimizer step for each minibatch of an iterable.

::

    the caller's thread:  batch -> BatchServer        wait for the loss -> yield it -> the loop's body -> next batch
                                     |                     ^
    a thread of its own:  train -> ranks (rank 0 reads) ---+ events

``BatchServer`` gives the minibatches of the loop to rank 0 (``autopipe.runtime.batches.from_loop``). Its thread answers
one connection, of a process of the same user. The minibatches are encoded in the thread of the loop, so that an error
there is raised in the loop.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import queue
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save

from autopipe.commands.prepared import Prepared
from autopipe.commands.settings import WORK_DIRECTORY, Events, StopEvent, TrainSettings, ignore_event
from autopipe.errors import ModelFileError, RunError
from autopipe.ir.artifact import write_text
from autopipe.report.results import TrainResult
from autopipe.runtime.audit import batch
from autopipe.runtime.audit.batch import UnstorableBatchError, encoded
from autopipe.runtime.batches.from_loop import END, LENGTHS, NEXT
from autopipe.runtime.unix_sockets import is_same_user, listening
from autopipe.schedules import REGISTRY
from autopipe.workload.batches import items
from autopipe.workload.target.targets import elsewhere

_EMPTY = object()

_NAME = "batches"

FOLDER, _FILE = "loop", "first_batch.py"
_TEXT = '''"""The first minibatch of a loop over Pipeline.steps. The model is captured and checked with it."""

from pathlib import Path

from autopipe.runtime.batches.from_loop import FirstBatch

data = FirstBatch(Path(__file__).parent)
'''
_LENGTH = "the loop ends with its iterable: use itertools.islice(batches, N), or break"
_READER = "rank 0 receives the minibatches from the loop"
_RESTART = "minibatches that the loop has given cannot be read again: call steps with resume=True after a failure"
# option -> why a loop does not take it
_REFUSED = {
    **dict.fromkeys(("steps", "epochs"), _LENGTH),
    **dict.fromkeys(("data", "input", "batch_size"), "the iterable gives the minibatches, and their size"),
    **dict.fromkeys(("data_reader", "allow_other_data"), _READER),
    **dict.fromkeys(("max_restarts", "elastic"), _RESTART),
    **dict.fromkeys(("hosts", "hostfile"), "ranks run on the machine of the loop"),
}


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


class BatchServer:
    """Gives each minibatch once, in order. The socket is in a new folder that only this user may enter."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="autopipe-loop-")).absolute()  # with mode 0700
        self.address = str(self._folder / _NAME)
        self._listener = listening(self._folder / _NAME)
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="autopipe-loop-batches", daemon=True)
        self._thread.start()

    def put(self, message: bytes) -> None:
        """Give a minibatch, as ``message_of`` encodes it."""
        self._messages.put(message)

    def end(self) -> None:
        """Give no further minibatch."""
        self._messages.put(END)

    def close(self) -> None:
        """Close the socket, and remove its folder."""
        self.end()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends a wait for a connection
        self._thread.join()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the rank has ended: the supervisor reports it
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    if is_same_user(connection):
                        self._serve(connection)
                        return

    def _serve(self, connection: socket.socket) -> None:
        message = b""
        while message != END and connection.recv(1) == NEXT:
            message = self._messages.get()
            connection.sendall(message)


def message_of(item: Any, where: str) -> bytes:
    """Return a minibatch as bytes. ``where``: which one it is, for the error.

    Raises: ModelFileError if it contains anything but tensors and plain values.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        text = json.dumps(encoded(item, tensors)).encode()
        data = save({name: tensor.clone() for name, tensor in tensors.items()})  # entries may share memory
    except UnstorableBatchError as error:
        raise _refusal(str(error), where) from None
    except (ValueError, KeyError, TypeError, RuntimeError) as error:  # a dtype that the format lacks
        raise _refusal(f"safetensors cannot store it: {type(error).__name__}: {error}", where) from None
    return LENGTHS.pack(len(text), len(data)) + text + data


def _refusal(why: str, where: str) -> ModelFileError:
    return ModelFileError(
        f"the minibatch cannot be sent to the ranks: {why}",
        where=where,
        remedy="give dense tensors, numbers, texts and None, in tuples, lists and dicts",
    )


def refuse_options(options: Mapping[str, Any]) -> None:
    """Refuse options of a call that a loop cannot have. Raises: RunError naming the first one."""
    for name, value in options.items():
        if name in _REFUSED and value not in (None, False):
            raise RunError(f"steps does not take {name}={value!r:.60}: {_REFUSED[name]}", remedy=f"omit {name}")
    launcher = options.get("launcher")
    if launcher not in (None, "local"):
        raise RunError(
            f"steps does not take launcher={launcher!r}: ranks run on the machine of the loop",
            remedy="omit launcher, or use train",
        )


def options_of(given: Mapping[str, Any], first: Any) -> dict[str, Any]:
    """Return the options of the training. ``first``: the first minibatch, which is written to the work directory.

    Raises: ArtifactError if that cannot be written.
    """
    folder = (Path(given.get("work_dir") or WORK_DIRECTORY) / FOLDER).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    batch.store(first, None, folder)
    write_text(folder / _FILE, _TEXT)
    others = {name: value for name, value in given.items() if name not in _REFUSED}
    return others | {"data": f"{folder / _FILE}:data", "epochs": 1}


def refuse_impossible(settings: TrainSettings, prepared: Prepared) -> None:
    """Refuse a plan that a loop cannot train, and a training without the loop that gives its data. Raises: RunError."""
    plan, text = prepared.plan, prepared.workload.spec.hooks.get("data", "")
    target = elsewhere(text) if text else None
    path = Path() if target is None else Path(target.location)
    if not settings.loop:
        if (path.parent.name, path.name) == (FOLDER, _FILE):
            raise RunError(
                "the data of this model is the first minibatch of a loop over Pipeline.steps, which is over",
                where=str(path),
                remedy="name the model again, with its own data; or continue with steps(batches, resume=True)",
            )
        return
    if not REGISTRY[plan.schedule].synchronous:
        raise RunError(
            f"schedule {plan.schedule!r} begins a minibatch before it ends the one before, but the loop gives a "
            "minibatch after the loss of the one before",
            remedy="use another schedule, such as '1f1b', or train",
        )
