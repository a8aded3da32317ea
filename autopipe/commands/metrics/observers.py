"""``Observers``: the hooks ``on_step`` and ``on_evaluate`` of the user, and the loggers of ``--log``.

::

    Listener --take--> queue --one thread of the command's process--> loggers, then the hook
                                        |
                                        +--"stop", an exception--> the run stops with a checkpoint

Training does not wait for them. It waits only if they are ``MOST`` rows behind, so that the queue stays small.
"""

from __future__ import annotations

import queue
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from autopipe.commands.settings import Events, TrainSettings
from autopipe.errors import ModelFileError, counted
from autopipe.units import in_seconds
from autopipe.workload import Workload
from autopipe.workload.hooks.hook import OBSERVERS, Hook
from autopipe.workload.target.targets import user_line

STOP = "stop"
MOST = 10_000
# the delay after which the user is warned, and how long a failed run waits for the rest
BEHIND_SECONDS, END_SECONDS = 10.0, 10.0
_WAIT_SECONDS = 0.1


class RunLogger(Protocol):
    """Another tool that records the figures of a run."""

    @property
    def name(self) -> str:
        """The name after ``--log``."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Record a row of ``metrics.jsonl``."""

    def close(self, *, ok: bool) -> None:
        """Write what is left. ``ok``: the run did not fail."""


def hooks_of(settings: TrainSettings, workload: Workload) -> dict[str, Hook]:
    """Return the hooks that observe a run: those of the settings, else those of the model file.

    Raises: ModelFileError for one that does not exist or has another signature.
    """
    given = {name: getattr(settings, name) for name in OBSERVERS if getattr(settings, name) is not None}
    return workload.observers(given)


class Observers:
    """The observers of one run. The thread is started by the first row."""

    def __init__(self, hooks: Mapping[str, Hook], events: Events, loggers: Sequence[RunLogger] = ()) -> None:
        self.hooks, self.loggers, self._events = dict(hooks), list(loggers), events
        # requests a graceful stop of the run
        self.ask: Callable[[str], None] = lambda source: None
        # the hook that requested it, "" before that
        self.stopped_by = ""
        self.error: ModelFileError | None = None
        self._rows: queue.SimpleQueue[tuple[str, Mapping[str, Any], float] | None] = queue.SimpleQueue()
        self._notes: deque[str] = deque()
        self._thread: threading.Thread | None = None
        self._ok = True
        # since when the row that is handled now was waiting; 0: no row is handled
        self._since = 0.0
        self._doing = ""
        self._warned = False

    def take(self, name: str, row: Mapping[str, Any]) -> None:
        """Take a row of the metrics. ``name``: the hook that is called with it."""
        if name not in self.hooks and not self.loggers:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="observers", daemon=True)
            self._thread.start()
        while self._rows.qsize() >= MOST and self._thread.is_alive():
            self.poll()
            self._thread.join(_WAIT_SECONDS)
        self._rows.put((name, dict(row), time.monotonic()))

    def poll(self) -> None:
        """Report what happened in the thread. Events are reported by the thread that watches the ranks."""
        while self._notes:
            self._events("note", {"text": self._notes.popleft()})
        behind = time.monotonic() - self._since if self._since else 0.0
        if behind > BEHIND_SECONDS and not self._warned:
            self._warned = True
            text = f"warning: {self._doing} is {in_seconds(behind)} behind training, which does not wait for it"
            self._events("note", {"text": text})

    def finish(self, *, ok: bool = True) -> None:
        """Wait until every row is handled, and close the loggers. ``ok`` False: wait ``END_SECONDS`` at most.

        Raises: ModelFileError for a hook that failed, if ``ok``.
        """
        if self._thread is None:
            for logger in self.loggers:
                self._close(logger, ok)
        else:
            self._ok = ok
            self._rows.put(None)
            end = time.monotonic() + END_SECONDS
            self._thread.join(1.0)
            if self._thread.is_alive():
                left = counted(max(self._rows.qsize() - 1, 0), "row")
                self._notes.append(f"waiting for {self._doing}: {left} of the metrics left")
            while self._thread.is_alive() and (ok or time.monotonic() < end):
                self.poll()
                self._thread.join(_WAIT_SECONDS)
        self.poll()
        if ok and self.error is not None:
            raise self.error

    def _work(self) -> None:
        while (item := self._rows.get()) is not None:
            name, row, self._since = item
            for logger in list(self.loggers):
                self._doing = f"--log {logger.name}"
                self._log(logger, row)
            if name in self.hooks and self.error is None:
                self._doing = self.hooks[name].label
                self._call(self.hooks[name], row)
            self._since = 0.0
        for logger in self.loggers:
            self._doing = f"--log {logger.name}"
            self._close(logger, self._ok and self.error is None)

    def _log(self, logger: RunLogger, row: Mapping[str, Any]) -> None:
        try:
            logger.log(row)
        except BaseException as error:
            self.loggers.remove(logger)
            self._notes.append(f"warning: --log {logger.name} failed: {_brief(error)}; training continues without it")

    def _close(self, logger: RunLogger, ok: bool) -> None:
        try:
            logger.close(ok=ok)
        except BaseException as error:
            self._notes.append(f"warning: --log {logger.name} could not end: {_brief(error)}")

    def _call(self, hook: Hook, row: Mapping[str, Any]) -> None:
        try:
            answer = hook.function(row["step"], dict(row))
        except BaseException as error:
            self._fail(
                hook, f"{hook.label} failed: {type(error).__name__}: {error}", user_line(error, hook.path), error
            )
            return
        if answer is None:
            return
        if isinstance(answer, str) and answer == STOP:
            if not self.stopped_by:
                self.stopped_by = hook.label
                self.ask(hook.label)
            return
        self._fail(
            hook, f"{hook.label} returned {answer!r:.60}; it may return None, or {STOP!r} to end the run", hook.place
        )

    def _fail(self, hook: Hook, what: str, where: str, cause: BaseException | None = None) -> None:
        remedy = "correct the hook; then add --resume to continue from the last checkpoint"
        self.error = ModelFileError(what, where=where, remedy=remedy)
        self.error.__cause__ = cause
        self.ask(f"{hook.label} failed")


def _brief(error: BaseException) -> str:
    """Return an error in one line. Those of a database contain the complete statement."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
