"""Teams of processes: every rank of the schedule is a team of ``size`` members, which are processes of their own.

::

    rank of the schedule      0       1       2
    process (2 members)      0 1     2 3     4 5

Members are adjacent, so that they are on one host where possible. Schedule, executor and stepper see ranks: member
``m`` of a rank exchanges tensors with member ``m`` of another one, each its own part. Sums inside of a team are calls
of the stage (``autopipe.team``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from autopipe.ir.messages import BATCH, Channel, batch_channel
from autopipe.runtime.transport.base import Pending, Transport
from autopipe.strides import Layout


class TeamTransport:
    """One member's end, as a ``Transport`` between ranks. ``processes``: the transport between processes."""

    def __init__(self, processes: Transport, size: int) -> None:
        self.processes, self.size = processes, size
        self.rank, self.member = divmod(processes.rank, size)
        self.world_size = processes.world_size // size
        self._members = tuple(range(self.rank * size, (self.rank + 1) * size))
        self.leads = processes.leads
        self.num_bytes = 0  # of the complete tensors that this member has exchanged inside of its team

    @property
    def through_host(self) -> bool:
        """As in ``Transport``."""
        return self.processes.through_host

    @through_host.setter
    def through_host(self, value: bool) -> None:
        self.processes.through_host = value

    def _process(self, rank: int) -> int:
        return rank * self.size + self.member

    def _of_members(self, channel: Channel) -> Channel:
        ends = self._process(channel.from_rank), self._process(channel.to_rank)
        return replace(channel, from_rank=ends[0], to_rank=ends[1])

    def _group(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._process(rank) for rank in ranks)

    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        """Send to the same member of another rank."""
        self.processes.send(self._of_members(channel), tensor)

    def receive(self, channel: Channel, shape: Sequence[int], dtype: torch.dtype) -> Pending:
        """Post a receive from the same member of another rank."""
        return self.processes.receive(self._of_members(channel), shape, dtype)

    def send_message(self, channel: Channel, tensors: Sequence[torch.Tensor], layouts: Sequence[Layout]) -> None:
        """Send the values of a message to the same member of another rank."""
        self.processes.send_message(self._of_members(channel), tensors, layouts)

    def receive_message(self, channel: Channel, layouts: Sequence[Layout]) -> list[Pending]:
        """Post the receives of a message from the same member of another rank."""
        return self.processes.receive_message(self._of_members(channel), layouts)

    def all_reduce(self, group: Sequence[int], tensor: torch.Tensor) -> None:
        """Sum over the same member of some ranks."""
        self.processes.all_reduce(self._group(group), tensor)

    def start_all_reduce(self, group: Sequence[int], tensor: torch.Tensor) -> Pending:
        """Start a sum over the same member of some ranks."""
        return self.processes.start_all_reduce(self._group(group), tensor)

    def agree(self, tensor: torch.Tensor) -> None:
        """Sum a CPU tensor over the same member of all ranks."""
        self.processes.all_reduce(self._group(range(self.world_size)), tensor)

    def reduce_scatter(self, group: Sequence[int], parts: torch.Tensor) -> torch.Tensor:
        """Sum entries over the same member of some ranks."""
        return self.processes.reduce_scatter(self._group(group), parts)

    def all_gather(self, group: Sequence[int], part: torch.Tensor) -> torch.Tensor:
        """Gather from the same member of some ranks."""
        return self.processes.all_gather(self._group(group), part)

    def barrier(self) -> None:
        """Wait for all processes."""
        self.processes.barrier()

    def close(self) -> None:
        """Close the transport between processes."""
        self.processes.close()

    def add(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the members of this rank, in place and in their order (``autopipe.team.Team``)."""
        self.num_bytes += tensor.numel() * tensor.element_size()
        self.processes.all_reduce(self._members, tensor)

    def add_parts(self, parts: torch.Tensor) -> torch.Tensor:
        """Sum the entry of ``parts`` [size, ...] that is this member's over the members of this rank."""
        self.num_bytes += parts.numel() * parts.element_size()
        return self.processes.reduce_scatter(self._members, parts)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all members of this rank, [size, ...]."""
        self.num_bytes += self.size * part.numel() * part.element_size()
        return self.processes.all_gather(self._members, part)


def channels_of(channels: Iterable[Channel], num_ranks: int, size: int) -> list[Channel]:
    """Return the channels between processes: one for each member; for minibatches, from the first to every other."""
    members = [
        replace(channel, from_rank=channel.from_rank * size + member, to_rank=channel.to_rank * size + member)
        for channel in channels
        if channel.kind != BATCH
        for member in range(size)
    ]
    return members + [batch_channel(process) for process in range(1, num_ranks * size)]


def groups_of(groups: Iterable[Sequence[int]], num_ranks: int, size: int) -> list[tuple[int, ...]]:
    """Return the groups of processes that compute sums on their devices, for those of ranks.

    They are the same member of each group, and each team.
    """
    members = {tuple(rank * size + member for rank in group) for group in groups for member in range(size)}
    return sorted(members | {tuple(range(rank * size, (rank + 1) * size)) for rank in range(num_ranks)})


def agreeing_groups(num_ranks: int, size: int) -> list[tuple[int, ...]]:
    """Return the groups of processes that ``TeamTransport.agree`` sums CPU tensors over: a member of all ranks.

    They need no communicator of NCCL, which would take device memory and a stream.
    """
    return [tuple(range(member, num_ranks * size, size)) for member in range(size)] if num_ranks > 1 else []


__all__ = ["TeamTransport", "agreeing_groups", "channels_of", "groups_of"]
