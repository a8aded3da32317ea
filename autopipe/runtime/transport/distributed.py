"""``ProcessTransport``: gloo for CPU tensors; for CUDA tensors NCCL, or gloo staged through the host.

Gloo separates channels by tag on one mesh. NCCL has no tags, and two operations in different order at the two ends of a
communicator deadlock: ``communicators`` says which channels share one. Every channel of gloo and every communicator is
used once at the start, because the first operation connects it, and lazy connections have hung.

Between CPU ranks, a message carries the order of its values in memory (``host_messages``), and a small one between two
ranks of a host travels over a Unix socket (``neighbours``). Between GPUs, activations and gradients are sent in the
order of the plan.

The all-reduce of gloo adds each part of a tensor in a different order, that of its ring from where the part starts.
Sums of three or more CPU ranks are therefore computed here (``rank_order``), and send the same number of bytes.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopipe.ir.messages import FIGURES, Channel
from autopipe.runtime.transport.base import Pending, translate, with_index
from autopipe.runtime.transport.communicators import Communicators
from autopipe.runtime.transport.host_messages import ArrivingMessage, HostMessage, host_message
from autopipe.runtime.transport.nccl import NcclTransfers
from autopipe.runtime.transport.rank_order import OrderedSums
from autopipe.runtime.transport.same_host_sockets import Neighbours
from autopipe.runtime.transport.sent_order import Departures
from autopipe.strides import Layout, packed, unpacked

_KEPT_MESSAGES = 4096  # whose way of travelling is known

CONNECT_SECONDS = 300.0
"""How long the first message of a communicator may take, by default."""


def backends() -> dict[str, bool]:
    """Return whether this torch was built with each of the backends that a run can use."""
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}


def start_process_group(store: Any, rank: int, world_size: int, *, timeout_seconds: float) -> None:
    """Join the ranks at ``store``, a torch store, over gloo. It carries control messages on any device."""
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )


def file_store(path: Path, count: int) -> Any:
    """Return a store in a file, for ``count`` ranks of one host."""
    return dist.FileStore(str(path), count)  # type: ignore[attr-defined]  # not in its __all__


class _Received:
    """A posted receive of a tensor whose elements arrive in ``buffer``, in the memory order of ``layout``.

    ``device``: where the tensor belongs, if it was staged through the host.
    """

    def __init__(
        self, works: Sequence[Any], buffer: torch.Tensor, device: torch.device, layout: Layout | None = None
    ) -> None:
        self._works, self._buffer, self._device, self._layout = works, buffer, device, layout

    def wait(self) -> torch.Tensor:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise translate(error) from error
        elements = self._buffer if self._buffer.device == self._device else self._buffer.to(self._device)
        return elements if self._layout is None else unpacked(elements, self._layout.shape, self._layout.order)


class _Value:
    """A value of a posted message between CPU ranks."""

    def __init__(self, message: ArrivingMessage, index: int) -> None:
        self._message, self._index = message, index

    def wait(self) -> torch.Tensor:
        try:
            return self._message.take(self._index)
        except RuntimeError as error:
            raise translate(error) from error


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise ``translate(error)`` in place of an error of torch."""
    try:
        yield
    except RuntimeError as error:
        raise translate(error) from error


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a CUDA tensor in page-locked memory."""
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    staged.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return staged


class ProcessTransport:
    """One rank's end, over the process group of ``start_process_group``.

    ``channels`` lists every channel of the run, in the same order on every rank. ``groups`` lists the sets of ranks
    that compute sums, on CPUs or GPUs. ``communicators``: those of NCCL; None if it is not used. ``store``: torch's, in
    which CPU ranks of one host find each other; None: gloo carries all messages.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        groups: Sequence[Sequence[int]] = (),
        *,
        device: torch.device | None = None,
        communicators: Communicators | None = None,
        timeout_seconds: float = CONNECT_SECONDS,
        store: Any = None,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.leads = self.rank == 0
        self.through_host = False
        self.device = with_index(device or torch.device("cpu"))
        ordered = list(dict.fromkeys(channels))
        self._tags = {channel: index + 1 for index, channel in enumerate(ordered)}
        # the channels whose values arrive in their own order in memory, so that results are equal to the last bit
        on_host = self.device.type == "cpu"
        self._by_host = {channel for channel in ordered if on_host and channel.kind not in FIGURES}
        self._sums: dict[tuple[int, ...], Any] = {tuple(range(self.world_size)): None}  # the default group
        self._sums |= {tuple(group): dist.new_group(list(group)) for group in sorted(map(tuple, groups))}
        self._ordered: dict[tuple[int, ...], OrderedSums] = {}
        # by the identity of a channel and of layouts, which it keeps alive
        self._known: dict[tuple[int, int], tuple[Channel, Sequence[Layout], tuple[HostMessage, int] | None]] = {}
        self._departures = Departures()
        self._nccl = (
            None if communicators is None else NcclTransfers(communicators, self.rank, self.device, timeout_seconds)
        )
        self._exercise(ordered)
        self._neighbours = Neighbours.connect(store, self.rank, self._by_host, timeout_seconds)

    def _by_nccl(self, channel: Channel) -> bool:
        return self._nccl is not None and not self.through_host and self._nccl.carries(channel)

    def _exercise(self, channels: Sequence[Channel]) -> None:
        """Send one element over every channel, so that a pair that cannot connect fails here, with its name."""
        for channel in channels:
            try:
                if channel.from_rank == self.rank:
                    self._send_by_gloo(channel, torch.zeros(1, dtype=torch.float32, device="cpu"))
                elif channel.to_rank == self.rank:
                    self._receive_by_gloo(channel, Layout((1,), torch.float32), self._arrives_on(channel)).wait()
            except RuntimeError as error:
                raise RuntimeError(f"cannot connect {channel}: {error}") from error

    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        """Start the transfer. The tensor is kept until it is sent."""
        self.send_message(channel, [tensor], [Layout(tuple(tensor.shape), tensor.dtype)])

    def send_message(self, channel: Channel, tensors: Sequence[torch.Tensor], layouts: Sequence[Layout]) -> None:
        """Start the transfer of the values of a message: together over NCCL; between CPU ranks, the small ones."""
        by_host = self._host_message(channel, layouts)
        if by_host is not None:
            self._departures.check()
            message, tag = by_host
            near = self._neighbours.to(channel.to_rank, message.num_bytes)
            try:
                for packet in message.packets(tensors):
                    if near is None:
                        self._departures.add(self._gloo.send([packet], channel.to_rank, tag), packet)
                    else:
                        near.send(tag, packet)
            except RuntimeError as error:
                raise translate(error) from error
            return
        filled = [(t.detach(), layout) for t, layout in zip(tensors, layouts, strict=True) if t.numel()]
        if not filled:
            return
        self._departures.check()
        if self._nccl is not None and filled[0][0].is_cuda and self._by_nccl(channel):
            with _translated():
                self._nccl.send(channel, [packed(tensor, layout.order) for tensor, layout in filled])
            return
        for tensor, layout in filled:
            elements = _on_host(packed(tensor, layout.order)) if tensor.is_cuda else tensor.contiguous()
            self._send_by_gloo(channel, elements)

    def _host_message(self, channel: Channel, layouts: Sequence[Layout]) -> tuple[HostMessage, int] | None:
        """Return how a message between CPU ranks travels, and its tag; None for other channels.

        The steps of a row have the same objects in every minibatch, so they are found by identity.
        """
        key = id(channel), id(layouts)
        known = self._known.get(key)
        if known is None:
            message = host_message(tuple(layouts)) if channel in self._by_host else None
            known = channel, layouts, None if message is None else (message, self._tags[channel])
            if isinstance(layouts, tuple):
                if len(self._known) >= _KEPT_MESSAGES:
                    self._known.clear()
                self._known[key] = known
        return known[2]

    @functools.cached_property
    def _gloo(self) -> Any:
        """The default group, whose methods check less than the functions of torch.distributed."""
        return dist.group.WORLD

    def _arrives_on(self, channel: Channel) -> torch.device:
        return torch.device("cpu") if channel.kind in FIGURES else self.device

    def _send_by_gloo(self, channel: Channel, tensor: torch.Tensor) -> None:
        with _translated():
            self._departures.add(dist.isend(tensor, channel.to_rank, tag=self._tags[channel]), tensor)

    def receive(self, channel: Channel, shape: Sequence[int], dtype: torch.dtype) -> Pending:
        """Post the receive. Activations and gradients arrive on the device of the rank."""
        return self.receive_message(channel, [Layout(tuple(shape), dtype)])[0]

    def receive_message(self, channel: Channel, layouts: Sequence[Layout]) -> list[Pending]:
        """Post the receives of the values of a message, in the order in which they are sent."""
        by_host = self._host_message(channel, layouts)
        if by_host is not None:
            message, tag = by_host
            gloo, sender = self._gloo, channel.from_rank
            near = self._neighbours.to(sender, message.num_bytes)
            try:
                arriving = message.receive(
                    lambda buffer: gloo.recv([buffer], sender, tag) if near is None else near.post(tag, buffer)
                )
            except RuntimeError as error:
                raise translate(error) from error
            return [_Value(arriving, index) for index in range(len(layouts))]
        device = self._arrives_on(channel)
        nccl = self._nccl if device.type == "cuda" and self._by_nccl(channel) else None
        if nccl is None:
            return [self._receive_by_gloo(channel, layout, device) for layout in layouts]
        buffers = [torch.empty(layout.shape, dtype=layout.dtype, device=device) for layout in layouts]
        filled = [buffer for buffer in buffers if buffer.numel()]
        with _translated():
            works = nccl.receive(channel, filled) if filled else []
        return [_Received(works, buffer, device, layout) for buffer, layout in zip(buffers, layouts, strict=True)]

    def _receive_by_gloo(self, channel: Channel, layout: Layout, device: torch.device) -> Pending:
        buffer = torch.empty(layout.shape, dtype=layout.dtype, device="cpu", pin_memory=device.type == "cuda")
        if buffer.numel() == 0:
            return _Received((), buffer, device, layout)
        with _translated():
            work = dist.irecv(buffer, channel.from_rank, tag=self._tags[channel])
        return _Received((work,), buffer, device, layout)

    def all_reduce(self, group: Sequence[int], tensor: torch.Tensor) -> None:
        """Sum over the group."""
        self.start_all_reduce(group, tensor).wait()

    def start_all_reduce(self, group: Sequence[int], tensor: torch.Tensor) -> Pending:
        """Start a sum over the group, which runs in threads or on a stream of the backend."""
        if len(group) > 2 and not tensor.is_cuda and (tensor.is_floating_point() or tensor.is_complex()):
            return self._in_rank_order(tuple(group)).start(tensor)
        with _translated():
            if self._nccl is not None and tensor.is_cuda:
                work = self._nccl.start_sum(group, tensor)
            else:
                work = dist.all_reduce(tensor, group=self._sums[tuple(group)], async_op=True)
        return _Received((work,), tensor, tensor.device)

    def reduce_scatter(self, group: Sequence[int], parts: torch.Tensor) -> torch.Tensor:
        """Sum in rank order on a CPU, over NCCL on a GPU."""
        if self._nccl is None or not parts.is_cuda:
            return self._in_rank_order(tuple(group)).reduce_scatter(parts)
        total = parts.new_empty(parts.shape[1:])
        with _translated():
            self._nccl.start_reduce_scatter(group, total, parts).wait()
        return total

    def all_gather(self, group: Sequence[int], part: torch.Tensor) -> torch.Tensor:
        """Exchange over gloo on a CPU, over NCCL on a GPU."""
        if self._nccl is None or not part.is_cuda:
            return self._in_rank_order(tuple(group)).all_gather(part)
        every = part.new_empty((len(group), *part.shape))
        with _translated():
            self._nccl.start_all_gather(group, every, part).wait()
        return every

    def _in_rank_order(self, group: tuple[int, ...]) -> OrderedSums:
        if group not in self._ordered:
            of = self._sums[group]
            self._ordered[group] = OrderedSums(
                group,
                self.rank,
                lambda tensor, rank, tag: dist.irecv(tensor, rank, group=of, tag=tag),
                lambda tensor, rank, tag: dist.isend(tensor, rank, group=of, tag=tag),
                translate,
            )
        return self._ordered[group]

    def agree(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks by gloo, which exchanges 2 log2(ranks) messages a rank."""
        with _translated():
            dist.all_reduce(tensor)

    def barrier(self) -> None:
        """Wait for every rank."""
        with _translated():
            dist.barrier()

    def close(self) -> None:
        """Wait for all sends and for the other ranks, and destroy the process group."""
        self._departures.drain()
        with _translated():
            self._neighbours.drain()
        for sums in self._ordered.values():
            sums.close()
        if self._nccl is not None:
            self._nccl.drain()
        self.barrier()
        self._neighbours.close()
        dist.destroy_process_group()
