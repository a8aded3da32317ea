"""A transport between threads that reads what is sent as late as it may, and hides what has not arrived.

A tensor is read when its receiver waits for it, a random time later. A tensor that is being summed holds NaN until the
sum is waited for. So a write after a send, and a read before a wait, change the results.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch

from autopipe.ir.messages import Channel
from autopipe.runtime.transport.base import Pending, ThreadHub, ThreadTransport
from autopipe.strides import copied

_LATEST = 0.002  # seconds


class LateHub(ThreadHub):
    """Connects ranks that are threads."""

    def transport(self, rank: int) -> LateTransport:
        """Return the end of one rank."""
        return LateTransport(self, rank)


class LateTransport(ThreadTransport):
    """One rank's end."""

    def __init__(self, hub: LateHub, rank: int) -> None:
        super().__init__(hub, rank)
        self._random = random.Random(rank)

    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        """Send the memory itself."""
        self._put(channel, tensor.detach())

    def receive(self, channel: Channel, shape: Sequence[int], dtype: torch.dtype) -> Pending:
        """Return a receive that reads the memory of the sender late."""
        return _Late(super().receive(channel, shape, dtype), self._random)

    def start_all_reduce(self, group: Sequence[int], tensor: torch.Tensor) -> Pending:
        """Take a copy, and overwrite the tensor until the sum is waited for."""
        pending = super().start_all_reduce(group, tensor)
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        return pending


class _Late:
    def __init__(self, pending: Pending, clock: random.Random) -> None:
        self._pending, self._clock = pending, clock

    def wait(self) -> torch.Tensor:
        tensor = self._pending.wait()
        time.sleep(self._clock.random() * _LATEST)
        return copied(tensor)
