"""``NcclTransfers``: the communicators of one rank, and the messages and sums that they carry.

The default process group is gloo's, and no device is bound to it: so a new communicator connects its members only,
and the other ranks do nothing. Every rank creates the communicators in one order, because their members wait for each
other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopipe.errors import RunError
from autopipe.ir.messages import Channel
from autopipe.runtime.transport.communicators import Communicators, Pair

_POLL_SECONDS = 0.005


class NcclTransfers:
    """The communicators of one rank.

    Args:
        communicators: those of the run.
        rank: of this process.
        device: of this rank.
        timeout_seconds: how long the first sum of each group and the first message over each pair may take.

    Raises: RunError naming ranks that cannot connect.

    """

    def __init__(self, communicators: Communicators, rank: int, device: torch.device, timeout_seconds: float) -> None:
        self._rank, self._device = rank, device
        self._sums = {group: self._create(group) for group in communicators.groups}
        self._pairs = {pair: self._create((pair.from_rank, pair.to_rank)) for pair in communicators.pairs}
        self._flying: deque[tuple[list[Any], Sequence[torch.Tensor]]] = deque()  # sends that may not be complete
        for group in communicators.groups:
            self._connect_group(group, timeout_seconds)
        for pair in communicators.pairs:
            self._connect(pair, timeout_seconds)

    def _create(self, ranks: Sequence[int]) -> Any:
        # transfers go ahead of kernels that wait for a free multiprocessor
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        return dist.new_group(list(ranks), backend="nccl", pg_options=options, device_id=self._device)

    def _connect(self, pair: Pair, timeout_seconds: float) -> None:
        """Send one element over a pair, so that ranks that cannot connect fail here, with their numbers."""
        if self._rank not in (pair.from_rank, pair.to_rank):
            return
        token = torch.zeros(1, device=self._device)
        if self._rank == pair.from_rank:
            work: Any = dist.isend(token, pair.to_rank, group=self._pairs[pair])
        else:
            work = dist.irecv(token, pair.from_rank, group=self._pairs[pair])
        self._complete(work, f"rank {pair.from_rank} cannot send to rank {pair.to_rank}", timeout_seconds)

    def _connect_group(self, group: tuple[int, ...], timeout_seconds: float) -> None:
        """Use a group once in every way.

        NCCL connects the members at their first collective, and allocates memory of the device for it. In training,
        that could wait for a receive that is posted, whose sender could wait for this rank.
        """
        if self._rank not in group:
            return
        tokens = torch.zeros(len(group), device=self._device)
        part = torch.zeros(1, device=self._device)
        for work in (
            self.start_sum(group, tokens),
            self.start_reduce_scatter(group, part, tokens.view(-1, 1)),
            self.start_all_gather(group, tokens.view(-1, 1), part),
        ):
            self._complete(work, f"ranks {list(group)} cannot compute a sum", timeout_seconds)

    @staticmethod
    def _complete(work: Any, failure: str, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RunError(
                    f"{failure} over NCCL: nothing arrived within {timeout_seconds:.0f} s",
                    remedy="set NCCL_DEBUG=INFO and read the logs of these ranks; check the network interface "
                    "(NCCL_SOCKET_IFNAME) and the firewall between the hosts",
                )
            time.sleep(_POLL_SECONDS)
        work.wait()

    def carries(self, channel: Channel) -> bool:
        """Return whether a channel has a communicator."""
        return Pair.of(channel) in self._pairs

    def send(self, channel: Channel, tensors: Sequence[torch.Tensor]) -> None:
        """Start the transfer of contiguous tensors, as one message. They are kept until they are sent."""
        while self._flying and all(work.is_completed() for work in self._flying[0][0]):
            self._flying.popleft()
        works = _together(dist.isend, tensors, channel.to_rank, self._pairs[Pair.of(channel)])
        self._flying.append((works, tensors))

    def receive(self, channel: Channel, buffers: Sequence[torch.Tensor]) -> list[Any]:
        """Post the receive of a message into buffers on the device, and return the works to wait for.

        Receives of one pair are posted in the order of the sends.
        """
        return _together(dist.irecv, buffers, channel.from_rank, self._pairs[Pair.of(channel)])

    def start_sum(self, group: Sequence[int], tensor: torch.Tensor) -> Any:
        """Start a sum over a group, in place."""
        return dist.all_reduce(tensor, group=self._sums[tuple(group)], async_op=True)

    def start_reduce_scatter(self, group: Sequence[int], total: torch.Tensor, parts: torch.Tensor) -> Any:
        """Start the sum of one contiguous entry of ``parts`` for each member of a group, into ``total``."""
        return dist.reduce_scatter_tensor(total, parts, group=self._sums[tuple(group)], async_op=True)

    def start_all_gather(self, group: Sequence[int], every: torch.Tensor, part: torch.Tensor) -> Any:
        """Start to gather the contiguous tensors of a group into ``every`` [members, ...]."""
        return dist.all_gather_into_tensor(every, part, group=self._sums[tuple(group)], async_op=True)

    def drain(self) -> None:
        """Wait until all sends are complete."""
        for works, _ in self._flying:
            for work in works:
                work.wait()
        self._flying.clear()
        torch.cuda.current_stream(self._device).synchronize()


def _together(operation: Any, tensors: Sequence[torch.Tensor], peer: int, group: Any) -> list[Any]:
    """Send or receive tensors as one NCCL group, which is one kernel."""
    if len(tensors) == 1:
        return [operation(tensors[0], peer, group=group)]
    works: list[Any] = dist.batch_isend_irecv([dist.P2POp(operation, t, peer, group) for t in tensors])
    return works
