"""Signals that ask a run to end: at once, or cleanly, with a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopRequest:
    """A request to stop the run cleanly, made by a signal or by the caller of ``train``.

    ``is_requested`` is the caller's own condition, polled while the run goes on.
    """

    def __init__(self, is_requested: Callable[[], bool] | None = None) -> None:
        self._signal = ""
        self._is_requested = is_requested

    @property
    def signal_name(self) -> str:
        """The source of the request, such as SIGTERM; "" before there is one."""
        if not self._signal and self._is_requested is not None and self._is_requested():
            self._signal = "stop"
        return self._signal

    def ask(self, source: str) -> None:
        """ScheduleSpec a stop; of several requests, the first counts."""
        self._signal = self.signal_name or source

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Take SIGTERM, SIGHUP, SIGUSR1 and the first Ctrl-C as the request; a second Ctrl-C ends everything at once.

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
    """Hold back what asks a run to end, so that a process started meanwhile is born deaf to it.

    Clusters send such signals to every process of a job, and only the one that watches the ranks may answer. It gets
    what came meanwhile afterwards: ignored, a signal would be lost, and the run would not stop.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Be about to end: launchers end all processes of a failed run, and this one keeps its exit code and last words.

    Ignored, and not handled: Python gives handlers up before it ends.
    """
    if threading.current_thread() is threading.main_thread():
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)


def leave_signals_to_supervisor() -> None:
    """Be a rank: outlive what asks the run to end; whoever watches the ranks decides what it means.

    SIGTERM is taken and not ignored, for programs that the user's code starts must be able to end by it.
    """
    for number in STOPPING:
        signal.signal(number, _outlive if number == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # held back from whatever this process was forked from


def _outlive(number: int, frame: Any) -> None:
    pass


@contextlib.contextmanager
def ending_as_interrupt() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a closed terminal, end the run the way Ctrl-C does, ranks and all.

    A signal that is ignored (``nohup``) stays ignored. Only the main thread may set handlers.
    """

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    with _handled(ENDING, interrupt):
        yield


def handled_by(stop: StopRequest | None) -> contextlib.AbstractContextManager[None]:
    """Return what a launcher does its work in: signals are ``stop``'s where there is one, else they end the run."""
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
