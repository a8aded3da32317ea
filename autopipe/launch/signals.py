"""Signals that ask a run to end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ending_as_interrupt() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a closed terminal, end the run the way Ctrl-C does, ranks and all.

    A signal that is ignored (``nohup``) stays ignored. Only the main thread may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.getsignal(number) for number in ENDING}
    try:
        for number, handler in previous.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
