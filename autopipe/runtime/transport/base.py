"""``Transport``: the interface through which ranks exchange tensors; and ``ThreadHub``, for ranks as threads.

A *channel* is one direction between two ranks for one purpose. Tensors arrive in the order in which they were sent. A
send never blocks: if it waited for its receiver, 1F1B would deadlock at two stages and four microbatches. A receive is
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
from autopipe.ir.messages import Channel
from autopipe.strides import Layout, arranged, copied


class TransportClosed(AutopipeError):  # noqa: N818 - a state of the transport, not a failure of this rank
    """The other end is gone. This is always the consequence of another failure, and never reported as the cause."""


_GONE = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "socket closed",
    "timed out waiting",
    "aborted",
)


def translate(error: RuntimeError) -> BaseException:
    """Return ``TransportClosed`` for an error of torch that means that another rank is gone, else the error itself."""
    text = str(error)
    return TransportClosed(text) if any(word in text.lower() for word in _GONE) else error


def with_index(device: torch.device) -> torch.device:
    """Return a device with its index, without which NCCL refuses a GPU: that of this process."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


class Pending(Protocol):
    """A receive that has been posted, or a sum that has started."""

    def wait(self) -> torch.Tensor:
        """Wait for the tensor and return it. Raises: TransportClosed."""


class Transport(Protocol):
    """One rank's end."""

    rank: int
    world_size: int
    leads: bool  # the first process of the run: it reports what is of all ranks
    through_host: bool  # messages go through host memory, also those that NCCL could carry; the same on all ranks

    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        """Send a tensor without waiting. It must not be changed in place afterwards."""

    def receive(self, channel: Channel, shape: Sequence[int], dtype: torch.dtype) -> Pending:
        """Post a receive."""

    def send_message(self, channel: Channel, tensors: Sequence[torch.Tensor], layouts: Sequence[Layout]) -> None:
        """Send the values of a message, in the memory orders of ``layouts``.

        Between CPU ranks, every tensor arrives in its own order, so that results are equal to the last bit.
        """

    def receive_message(self, channel: Channel, layouts: Sequence[Layout]) -> list[Pending]:
        """Post the receives of the values of a message."""

    def all_reduce(self, group: Sequence[int], tensor: torch.Tensor) -> None:
        """Sum a tensor over the ranks of ``group``, in place. All of them call it, in the same order.

        On a CPU every element is summed in the order of the rank numbers, over every transport. Groups are those of
        replicas. The group of all ranks takes CPU tensors only.
        """

    def agree(self, tensor: torch.Tensor) -> None:
        """Sum a CPU tensor over all ranks, in place and in any order: the sum of each element must be exact."""

    def start_all_reduce(self, group: Sequence[int], tensor: torch.Tensor) -> Pending:
        """Start the same sum without waiting. The tensor must not be used until ``wait`` returns it."""

    def reduce_scatter(self, group: Sequence[int], parts: torch.Tensor) -> torch.Tensor:
        """Return the sum over ``group`` of one entry of ``parts`` [len(group), ...]: that of this rank's position.

        Every element is summed in the order of the rank numbers on a CPU, as by ``all_reduce``.
        """

    def all_gather(self, group: Sequence[int], part: torch.Tensor) -> torch.Tensor:
        """Return the tensors of the ranks of ``group``, [len(group), ...], in the order of their numbers."""

    def barrier(self) -> None:
        """Wait for every rank."""

    def close(self) -> None:
        """Wait until everything is sent, and release all resources."""


class _Arrival:
    def __init__(self, take: Callable[[], torch.Tensor]) -> None:
        self._take = take

    def wait(self) -> torch.Tensor:
        return self._take()


class ThreadHub:
    """Connects ranks that are threads of one process, by one queue per channel.

    ``planned_orders``: messages arrive in the memory orders of the plan also if they are on the CPU, as between GPUs.
    """

    def __init__(self, world_size: int, timeout_seconds: float = 300.0, *, planned_orders: bool = False) -> None:
        self.world_size, self.planned_orders = world_size, planned_orders
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
        """Return the sums of a group."""
        with self._lock:
            return self._sums.setdefault(group, _Sum(self, group))

    def abort(self) -> None:
        """Wake every rank that waits: one of them has failed."""
        self.aborted.set()
        self._barrier.abort()
        with self._lock:
            sums = list(self._sums.values())
        for group_sum in sums:
            with group_sum.changed:
                group_sum.changed.notify_all()

    def wait_for_all(self) -> None:
        """Wait until every rank has called this."""
        self._barrier.wait(self.timeout_seconds)

    def transport(self, rank: int) -> ThreadTransport:
        """Return the end of one rank."""
        return ThreadTransport(self, rank)


class _Sum:
    """The sums of one group. Each rank deposits its tensor and continues; a rank that waits takes those of all."""

    def __init__(self, hub: ThreadHub, group: tuple[int, ...]) -> None:
        self.hub, self.group = hub, group
        self.changed = threading.Condition()
        self.started: Counter[int] = Counter()  # the number of sums that each rank has started
        self.parts: dict[int, dict[int, torch.Tensor]] = {}  # by number of the sum, then by rank
        self.taken: Counter[int] = Counter()

    def put(self, rank: int, tensor: torch.Tensor) -> int:
        """Deposit a tensor and return the number of the sum that it belongs to."""
        with self.changed:
            number = self.started[rank]
            self.started[rank] += 1
            self.parts.setdefault(number, {})[rank] = tensor.clone()
            self.changed.notify_all()
        return number

    def take(self, number: int) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in their order, when all have arrived. Raises: TransportClosed."""

        def complete() -> bool:
            return len(self.parts[number]) == len(self.group) or self.hub.aborted.is_set()

        with self.changed:
            notified = self.changed.wait_for(complete, self.hub.timeout_seconds)
            missing = [rank for rank in self.group if rank not in self.parts[number]]
            if missing:
                text = f"ranks {missing} of {list(self.group)} sent nothing for {self.hub.timeout_seconds:.0f} s"
                raise TransportClosed("another rank has failed") if notified else RunError(text)
            parts = [self.parts[number][rank] for rank in sorted(self.group)]
            self.taken[number] += 1
            if self.taken[number] == len(self.group):
                del self.parts[number], self.taken[number]
        return parts


def _added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum(parts[1:], start=parts[0])  # one after the other, as processes do


class ThreadTransport:
    """One rank's end of a ``ThreadHub``."""

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self.hub, self.rank, self.world_size = hub, rank, hub.world_size
        self.leads = rank == 0
        self.through_host = False

    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        """Put a copy of the tensor into the queue. As between processes, the receiver shares no memory."""
        with _disable_current_modes():  # a memory meter of this rank must not count the receiver's copy
            arriving = copied(tensor.detach())
        self._put(channel, arriving)

    def _put(self, channel: Channel, arriving: torch.Tensor) -> None:
        self.hub.queue(channel).put(arriving)

    def send_message(self, channel: Channel, tensors: Sequence[torch.Tensor], layouts: Sequence[Layout]) -> None:
        """Send the values one by one."""
        for tensor, layout in zip(tensors, layouts, strict=True):
            if tensor.is_cuda or self.hub.planned_orders:
                with _disable_current_modes():
                    arriving = arranged(tensor.detach(), layout.order)
                self._put(channel, arriving)
            else:
                self.send(channel, tensor)

    def receive_message(self, channel: Channel, layouts: Sequence[Layout]) -> list[Pending]:
        """Return one receive for each value."""
        return [self.receive(channel, layout.shape, layout.dtype) for layout in layouts]

    def receive(self, channel: Channel, shape: Sequence[int], dtype: torch.dtype) -> Pending:
        """Return a receive that takes the next tensor from the queue."""
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
        """Sum in rank order."""
        self.start_all_reduce(group, tensor).wait()

    def start_all_reduce(self, group: Sequence[int], tensor: torch.Tensor) -> Pending:
        """Deposit the tensor. ``wait`` computes the sum."""
        group_sum = self.hub.sum(tuple(group))
        number = group_sum.put(self.rank, tensor)
        return _Arrival(lambda: tensor.copy_(_added(group_sum.take(number))))

    def reduce_scatter(self, group: Sequence[int], parts: torch.Tensor) -> torch.Tensor:
        """Sum in rank order."""
        group_sum, place = self.hub.sum(tuple(group)), sorted(group).index(self.rank)
        return _added([each[place] for each in group_sum.take(group_sum.put(self.rank, parts))])

    def all_gather(self, group: Sequence[int], part: torch.Tensor) -> torch.Tensor:
        """Return copies."""
        group_sum = self.hub.sum(tuple(group))
        return torch.stack(group_sum.take(group_sum.put(self.rank, part)))

    def agree(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks."""
        self.all_reduce(range(self.world_size), tensor)

    def barrier(self) -> None:
        """Wait for every rank."""
        try:
            self.hub.wait_for_all()
        except threading.BrokenBarrierError:
            raise TransportClosed("another rank has failed") from None

    def close(self) -> None:
        """Do nothing: this transport has no resources."""
