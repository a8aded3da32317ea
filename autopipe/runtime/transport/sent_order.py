"""``Departures``: the tensors that a rank has sent over gloo, and keeps until they have left."""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch

from autopipe.runtime.transport.base import translate

# the most that is kept of sends before a thread waits for them: these bytes and sends, or this many of larger tensors
_KEPT_BYTES, _KEPT_SENDS = 1 << 14, 64
_KEPT_LARGE, _KEPT_LARGE_BYTES = 4, 1 << 22


class Departures:
    """Keeps tensors that are sent over gloo until the send is complete.

    Gloo reports a complete send only to a caller that waits for it, and a rank that waited would stop computing. So one
    thread waits for the sends in order. The next ``check`` raises their failure.

    Each wakeup of the thread takes the interpreter from the rank, which costs more than a small send. So the thread
    gets several tensors at a time, which keep their memory until then.
    """

    def __init__(self) -> None:
        self._recent: list[tuple[Any, torch.Tensor]] = []
        self._recent_bytes = 0
        self._queue: queue.SimpleQueue[list[tuple[Any, torch.Tensor]] | None] = queue.SimpleQueue()
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._wait, name="departures", daemon=True)
        self._thread.start()

    def add(self, work: Any, tensor: torch.Tensor) -> None:
        """Keep a tensor until its send is complete, and a few sends longer unless it is very large."""
        self._recent.append((work, tensor))
        self._recent_bytes += tensor.nbytes
        if (
            self._recent_bytes > max(_KEPT_BYTES, min(_KEPT_LARGE * tensor.nbytes, _KEPT_LARGE_BYTES))
            or len(self._recent) >= _KEPT_SENDS
        ):
            self._hand_over()

    def _hand_over(self) -> None:
        self._queue.put(self._recent)
        self._recent, self._recent_bytes = [], 0

    def check(self) -> None:
        """Raise the failure of a send, if there was one."""
        if self._error is not None:
            raise translate(self._error) from self._error

    def drain(self) -> None:
        """Wait until all sends are complete. Nothing can be added afterwards."""
        self._hand_over()
        self._queue.put(None)
        self._thread.join()
        self.check()

    def _wait(self) -> None:
        while (sends := self._queue.get()) is not None:
            for work, _ in sends:
                try:
                    work.wait()
                except RuntimeError as error:
                    self._error = self._error or error
            sends = work = _ = None  # free the tensors while the queue is empty
