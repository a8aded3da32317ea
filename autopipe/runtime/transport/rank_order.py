"""Sums over CPU processes in the order of their ranks, which a plain loop can reproduce.

::

    rank 0: [a0 a1 a2]      each rank gets one part        a0 + b0 + c0      and sends the       every rank holds
    rank 1: [b0 b1 b2]  ->  of every rank, and adds   ->   a1 + b1 + c1  ->  sum to all      ->  all three sums
    rank 2: [c0 c1 c2]      up in the order of ranks       a2 + b2 + c2

This is a reduce-scatter and an all-gather. As in a ring, each rank sends 2 (r - 1) / r of the tensor.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

_SCATTER, _GATHER = 1, 2
Transfer = Callable[[torch.Tensor, int, int], Any]


class _Sum:
    """A sum that has started."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.done = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> torch.Tensor:
        """Wait for the sum and return it. Raises: the failure of the transfer."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self.tensor


class OrderedSums:
    """The sums of one group of CPU ranks, computed one after the other in a thread.

    ``receive`` and ``send`` take (tensor, rank, tag) and return a work to wait for. ``translate`` turns an error of
    torch into one of the transport.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        receive: Transfer,
        send: Transfer,
        translate: Callable[[RuntimeError], BaseException],
    ) -> None:
        self.ranks, self.rank = sorted(ranks), rank
        self._receive, self._send, self._translate = receive, send, translate
        self._queue: queue.SimpleQueue[_Sum | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="sums", daemon=True)
        self._thread.start()

    def start(self, tensor: torch.Tensor) -> _Sum:
        """Start to sum a tensor over the group, in place. Every rank of the group starts the same sums in order."""
        started = _Sum(tensor)
        self._queue.put(started)
        return started

    def close(self) -> None:
        """Wait until all started sums are complete."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (started := self._queue.get()) is not None:
            try:
                self._add_up(started.tensor)
            except RuntimeError as error:
                started.error = self._translate(error)
            except BaseException as error:  # raised by the rank that waits
                started.error = error
            started.done.set()
            started = None  # free the tensor while the queue is empty

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the sum of this rank's entry of ``parts`` [ranks, ...], in the calling thread.

        No other sum of the group may be under way. Raises: the failure of the transfer.
        """
        try:
            return self._reduced(dict(zip(self.ranks, parts.detach().contiguous(), strict=True)))
        except RuntimeError as error:
            raise self._translate(error) from error

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, [ranks, ...], in the calling thread, as ``reduce_scatter``."""
        every = part.new_empty((len(self.ranks), *part.shape))
        every[self.ranks.index(self.rank)] = part
        try:
            self._share(dict(zip(self.ranks, every, strict=True)))
        except RuntimeError as error:
            raise self._translate(error) from error
        return every

    def _add_up(self, tensor: torch.Tensor) -> None:
        flat = tensor.detach().view(-1)
        parts = dict(zip(self.ranks, torch.tensor_split(flat, len(self.ranks)), strict=True))
        parts[self.rank].copy_(self._reduced(parts))
        self._share(parts)

    def _reduced(self, parts: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return the sum over the ranks of the part that is this rank's."""
        own = parts[self.rank]
        arrived = {rank: torch.empty_like(own) for rank in self.ranks if rank != self.rank}
        self._exchange(arrived, parts, _SCATTER)
        arrived[self.rank] = own
        total = arrived[self.ranks[0]].clone()
        for rank in self.ranks[1:]:
            total += arrived[rank]
        return total

    def _share(self, parts: dict[int, torch.Tensor]) -> None:
        """Fill the parts of the other ranks, and send them this rank's."""
        others = {rank: part for rank, part in parts.items() if rank != self.rank}
        self._exchange(others, dict.fromkeys(others, parts[self.rank]), _GATHER)

    def _exchange(self, into: dict[int, torch.Tensor], out: dict[int, torch.Tensor], tag: int) -> None:
        """Receive a tensor from each rank and send one to each. A tensor without elements is not sent."""
        works = [self._receive(t, rank, tag) for rank, t in into.items() if t.numel()]
        place = self.ranks.index(self.rank)
        for rank in (*self.ranks[place + 1 :], *self.ranks[:place]):  # each rank starts with a different one
            if out[rank].numel():
                works.append(self._send(out[rank], rank, tag))
        for work in works:
            work.wait()
