"""Signals that request the end of a run: at once, or gracefully, with a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopRequest:
    """A request for a graceful stop, by a signal or by the caller of ``train``."""

    def __init__(self, is_requested: Callable[[], bool] | None = None) -> None:
        """Request nothing yet. ``is_requested``: the caller's own condition, polled during the run."""
        self._source = ""
        self._is_requested = is_requested

    @property
    def signal_name(self) -> str:
        """The source of the request, such as SIGTERM; "" without a request."""
        if not self._source and self._is_requested is not None and self._is_requested():
            self._source = "stop"
        return self._source

    def ask(self, source: str) -> None:
        """Request a stop; the first of several requests counts."""
        self._source = self.signal_name or source

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Treat SIGTERM, SIGHUP, SIGUSR1 and the first Ctrl-C as the request; a second Ctrl-C ends the run at once.

        A signal that is ignored (``nohup``) stays ignored. Only the main thread may set handlers.
        """

        def take(number: int, frame: Any) -> None:
            if number == signal.SIGINT and self.signal_name:
                raise KeyboardInterrupt
            self.ask(signal.Signals(number).name)

        with _handled(STOPPING, take):
            yield


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block the signals that request the end, so that a process started meanwhile inherits them blocked.

    Clusters send such signals to every process of a job, but only the one that watches the ranks may respond. It
    receives them after the block: if they were ignored, they would be lost, and the run would not stop.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Ignore signals before exiting: launchers end all processes of a failed run, but this exit code must survive.

    The signals are ignored rather than handled because Python removes handlers before it exits.
    """
    if threading.current_thread() is threading.main_thread():
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)


def leave_signals_to_supervisor() -> None:
    """Make the process of a rank survive the signals that request the end: the supervisor handles them.

    SIGTERM is handled rather than ignored: the programs that the user's code starts would inherit an ignored signal.
    """
    for number in STOPPING:
        signal.signal(number, (lambda *_: None) if number == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # inherited from the fork server


@contextlib.contextmanager
def ending_as_interrupt() -> Iterator[None]:
    """Make SIGTERM, and SIGHUP of a closed terminal, end the run as Ctrl-C does, including its ranks.

    A signal that is ignored (``nohup``) stays ignored. Only the main thread may set handlers.
    """

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    with _handled(ENDING, interrupt):
        yield


def handled_by(stop: StopRequest | None) -> contextlib.AbstractContextManager[None]:
    """Return the context that a launcher works in: without a ``stop`` that handles the signals, they end the run."""
    return ending_as_interrupt() if stop is None else contextlib.nullcontext()


@contextlib.contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Callable[[int, Any], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, before in previous.items():
            if before != signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
