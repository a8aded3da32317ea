"""``Transport``: how a tensor gets from one rank to another. The runtime knows this interface and nothing below it.

A *channel* is one direction between two ranks for one purpose; what is sent into it comes out in the same order. A
send never blocks (one that waits for its receiver deadlocks 1F1B at two stages and four microbatches). A receive is
posted early and waited for late, so that the transfer overlaps with computation.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autopipe.errors import AutopipeError, InternalError, RunError
from autopipe.ir.channel import Channel
from autopipe.runtime.transport.strides import copied


class TransportClosed(AutopipeError):  # noqa: N818 - it is the state that a waiting rank finds, not its own failure
    """The other end is gone: always the consequence of another failure, so it is never reported as the cause."""


class Pending(Protocol):
    """A receive that has been posted, or a sum that has been started."""

    def wait(self) -> torch.Tensor:
        """Return the tensor once it is there. Raises: TransportClosed."""


class Transport(Protocol):
    """What one rank sends and receives with."""

    rank: int
    world_size: int

    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        """Hand over a tensor and return at once. It must not be changed in place afterwards."""

    def receive(self, channel: Channel, shape: Sequence[int], dtype: torch.dtype) -> Pending:
        """Post a receive."""

    def all_reduce(self, group: Sequence[int], tensor: torch.Tensor) -> None:
        """Add up a tensor over the ranks of ``group``, in place; every one of them calls it, in the same order.

        On a CPU every element is the sum of the ranks' elements in the order of their numbers, over every transport.
        Groups are those of the replicas; of all ranks together only tensors on the CPU can be added up.
        """

    def start_all_reduce(self, group: Sequence[int], tensor: torch.Tensor) -> Pending:
        """Start the same and return at once. The tensor is left alone until ``wait`` returns it, summed."""

    def barrier(self) -> None:
        """Wait for every rank."""

    def close(self) -> None:
        """Finish what was sent and let go of everything."""


class _Arrival:
    def __init__(self, take: Callable[[], torch.Tensor]) -> None:
        self._take = take

    def wait(self) -> torch.Tensor:
        return self._take()


class ThreadHub:
    """Ranks as threads of one process: one queue a channel. ``abort`` wakes every rank that waits."""

    def __init__(self, world_size: int, timeout_seconds: float = 300.0) -> None:
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self.aborted = threading.Event()
        self._barrier = threading.Barrier(world_size)
        self._queues: dict[Channel, queue.SimpleQueue[torch.Tensor]] = {}
        self._sums: dict[tuple[int, ...], _Sum] = {}
        self._lock = threading.Lock()

    def queue(self, channel: Channel) -> queue.SimpleQueue[torch.Tensor]:
        """Return the queue of a channel."""
        with self._lock:
            return self._queues.setdefault(channel, queue.SimpleQueue())

    def sum(self, group: tuple[int, ...]) -> _Sum:
        """Return the meeting point of a group."""
        with self._lock:
            return self._sums.setdefault(group, _Sum(self, group))

    def abort(self) -> None:
        """Wake every rank: one of them has failed."""
        self.aborted.set()
        self._barrier.abort()
        with self._lock:
            meetings = list(self._sums.values())
        for meeting in meetings:
            with meeting.changed:
                meeting.changed.notify_all()

    def wait_for_all(self) -> None:
        """Return when every rank has come here."""
        self._barrier.wait(self.timeout_seconds)

    def transport(self, rank: int) -> ThreadTransport:
        """Return a rank's end."""
        return ThreadTransport(self, rank)


class _Sum:
    """One group's sums: everyone puts its tensor down and goes on; whoever waits adds them up, in rank order."""

    def __init__(self, hub: ThreadHub, group: tuple[int, ...]) -> None:
        self.hub, self.group = hub, group
        self.changed = threading.Condition()
        self.started: Counter[int] = Counter()  # how many sums each rank has started
        self.parts: dict[int, dict[int, torch.Tensor]] = {}  # by number of the sum, then by rank
        self.taken: Counter[int] = Counter()

    def put(self, rank: int, tensor: torch.Tensor) -> int:
        """Return the number of the sum that this tensor is a part of."""
        with self.changed:
            number = self.started[rank]
            self.started[rank] += 1
            self.parts.setdefault(number, {})[rank] = tensor.clone()
            self.changed.notify_all()
        return number

    def take(self, number: int) -> torch.Tensor:
        """Return a sum, once all parts are there. Raises: TransportClosed."""

        def over() -> bool:
            return len(self.parts[number]) == len(self.group) or self.hub.aborted.is_set()

        with self.changed:
            there = self.changed.wait_for(over, self.hub.timeout_seconds)
            missing = [rank for rank in self.group if rank not in self.parts[number]]
            if missing:
                text = f"ranks {missing} of {list(self.group)} brought nothing for {self.hub.timeout_seconds:.0f} s"
                raise TransportClosed("another rank has failed") if there else RunError(text)
            parts = [self.parts[number][rank] for rank in sorted(self.group)]
            self.taken[number] += 1
            if self.taken[number] == len(self.group):
                del self.parts[number], self.taken[number]
        return sum(parts[1:], start=parts[0])  # one after the other, as processes do


class ThreadTransport:
    """One rank's end of a ``ThreadHub``."""

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self.hub, self.rank, self.world_size = hub, rank, hub.world_size

    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        """Put the tensor into the queue. The receiver gets memory of its own, as it would from another process."""
        with _disable_current_modes():  # whoever counts this rank's memory is not to count the receiver's
            arriving = copied(tensor.detach())
        self.hub.queue(channel).put(arriving)

    def receive(self, channel: Channel, shape: Sequence[int], dtype: torch.dtype) -> Pending:
        """Return what takes the next tensor out of the queue."""
        source = self.hub.queue(channel)

        def take() -> torch.Tensor:
            waited = 0.0
            while True:
                try:
                    tensor = source.get(timeout=0.05)
                    break
                except queue.Empty:
                    waited += 0.05
                    if self.hub.aborted.is_set():
                        raise TransportClosed("another rank has failed") from None
                    if waited >= self.hub.timeout_seconds:
                        raise RunError(f"nothing arrived for {waited:.0f} s: {channel}") from None
            if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
                raise InternalError(f"{channel}: expected {dtype}{list(shape)}, got {tensor.dtype}{list(tensor.shape)}")
            return tensor

        return _Arrival(take)

    def all_reduce(self, group: Sequence[int], tensor: torch.Tensor) -> None:
        """Add up in rank order."""
        self.start_all_reduce(group, tensor).wait()

    def start_all_reduce(self, group: Sequence[int], tensor: torch.Tensor) -> Pending:
        """Put the tensor down; the sum is made where it is waited for."""
        meeting = self.hub.sum(tuple(group))
        number = meeting.put(self.rank, tensor)
        return _Arrival(lambda: tensor.copy_(meeting.take(number)))

    def barrier(self) -> None:
        """Wait for every rank."""
        try:
            self.hub.wait_for_all()
        except threading.BrokenBarrierError:
            raise TransportClosed("another rank has failed") from None

    def close(self) -> None:
        """Nothing is held."""
