"""Latency and bandwidth of messages and all-reduces between two ranks, and of copies between host and device.

A message of n bytes takes ``latency + n / bandwidth`` in this model: the latency is measured with a message of four
bytes, the bandwidth from the difference between a small and a large one. Figures are medians over rounds. Over NCCL,
both messages are larger, because NVLink reaches its bandwidth only with many megabytes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from autopipe.errors import AutopipeError, RunError
from autopipe.ir import artifact, decoding
from autopipe.ir.cluster import Level, Links
from autopipe.ir.messages import ACTIVATION, Channel
from autopipe.ir.schedule import Instruction, Op
from autopipe.launch import env
from autopipe.launch.rank.cpu_tuning import keep_freed_memory
from autopipe.launch.remote import network
from autopipe.launch.remote.rank_environment import RankIdentity
from autopipe.launch.request import LOOPBACK, LaunchSettings
from autopipe.runtime.checkpoint.host_buffer import HostBuffer
from autopipe.runtime.spilling.copies import lane_of
from autopipe.runtime.transport.communicators import Communicators
from autopipe.runtime.transport.distributed import ProcessTransport, start_process_group
from autopipe.workers.task import Link
from autopipe.workers.worker import Worker, wait_for


@dataclass(frozen=True, slots=True)
class Sizes:
    """The messages that are measured, in bytes, each with its number of rounds."""

    small: int
    large: int
    rounds_of_large: int
    tiny: int = 4

    @property
    def rounds(self) -> dict[int, int]:
        """The number of rounds of each size."""
        return {self.tiny: 200, self.small: 50, self.large: self.rounds_of_large}


THROUGH_HOST = Sizes(256 * 2**10, 16 * 2**20, 15)
OVER_NCCL = Sizes(2**20, 512 * 2**20, 20)
_WARM_UP = 3
_COPY_ROUNDS = 7
_COPY_WARM_UP = 2
TIMEOUT_SECONDS = 120.0
_REMEDY = "autopipe doctor"
_PAIR = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """One of the two ranks."""

    rank: int
    device: str  # cpu or cuda
    store: str  # the file in which the ranks meet, if both are on this machine
    identity: RankIdentity | None = None  # if a launcher has started the other one on another host
    interface: str = ""  # these two: as in ``LaunchSettings``
    trust_network: bool = False


def measure_links(device: str = "cpu") -> Links:
    """Start two ranks, measure between them, and end them.

    ``device``: cpu or cuda. If there is one GPU, both ranks share it and exchange messages through the host.

    Raises: RunError if a rank fails, or does not answer within ``TIMEOUT_SECONDS``.
    """
    with tempfile.TemporaryDirectory(prefix="autopipe-links-") as scratch:
        store = str(Path(scratch) / "store")
        return Links(**_report_of([_End(rank=rank, device=device, store=store) for rank in _PAIR]))


def measure_across(device: str, identity: RankIdentity, settings: LaunchSettings) -> Level:
    """Measure between this host and another one, where a launcher has started the other process.

    Raises: RunError if a rank fails, or does not answer within ``TIMEOUT_SECONDS``.
    """
    end = _End(
        rank=identity.rank,
        device=device,
        store="",
        identity=identity,
        interface=settings.interface,
        trust_network=settings.trust_network,
    )
    report = _report_of([end])
    return Level("measured hosts", 2, report["bandwidth"], report["latency_seconds"], report["all_reduce_bandwidth"])


def _report_of(ends: Sequence[_End]) -> dict[str, Any]:
    """Run ranks as processes, and return the figures of the first that reports."""
    ranks: list[Worker] = []
    try:
        for end in ends:
            task = artifact.encode(end)
            ranks.append(Worker(measure_end, task, doing="measuring the links"))
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while any(rank.value is None for rank in ranks):
            wait_for(ranks, deadline - time.monotonic())
            if time.monotonic() > deadline:
                raise RunError(f"two ranks exchanged no messages within {TIMEOUT_SECONDS:.0f} s", remedy=_REMEDY)
            for number, rank in enumerate(ranks):
                list(rank.receive())  # nothing but its end is due
                if rank.error is not None:
                    what = rank.error.what if isinstance(rank.error, AutopipeError) else str(rank.error)
                    raise RunError(f"the links could not be measured: rank {number}: {what}", remedy=_REMEDY)
    finally:
        for rank in ranks:
            rank.end()
    report: dict[str, Any] = ranks[0].value
    return report


def measure_end(task: Any, link: Link) -> dict[str, str | float]:
    """Be one of the two ranks, in a process of its own, and return the figures."""
    end: _End = decoding.decode(_End, task, "task")
    if end.device == "cpu":
        keep_freed_memory()
    return _measure(end)


def _store(end: _End) -> Any:
    """Return the store in which the ranks meet, and bind their messages to its network."""
    if end.identity is None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        return dist.FileStore(end.store, len(_PAIR))  # type: ignore[attr-defined]  # exported, though not by name
    settings = LaunchSettings(interface=end.interface, trust_network=end.trust_network)
    store, address = env.store_of(end.identity, settings, timeout_seconds=TIMEOUT_SECONDS)
    interface = end.interface or network.interface_towards(address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    return store


def _measure(end: _End) -> dict[str, str | float]:
    rank, where = end.rank, torch.device(end.device)
    if where.type == "cuda":
        torch.cuda.set_device(0 if end.identity is not None else rank % torch.cuda.device_count())
    use_nccl = where.type == "cuda" and (end.identity is not None or torch.cuda.device_count() >= len(_PAIR))
    store = _store(end)
    start_process_group(store, rank, len(_PAIR), timeout_seconds=TIMEOUT_SECONDS)
    to = tuple(Channel(ACTIVATION, a, b, a, b) for a, b in (_PAIR, _PAIR[::-1]))
    communicators = Communicators.of(to, (_PAIR,)) if use_nccl else None
    transport = ProcessTransport(
        to, (_PAIR,), device=where, communicators=communicators, timeout_seconds=TIMEOUT_SECONDS, store=store
    )

    def ping(tensor: torch.Tensor) -> None:
        if rank == 0:
            transport.send(to[0], tensor)
        pending = transport.receive(to[1 - rank], tensor.shape, tensor.dtype)
        pending.wait()
        if rank == 1:
            transport.send(to[1], tensor)

    def add_up(tensor: torch.Tensor) -> None:
        transport.all_reduce(_PAIR, tensor)

    figures = figures_of(ping, add_up, where, transport, OVER_NCCL if use_nccl else THROUGH_HOST)
    transport.barrier()
    between = {"host_bandwidth": _host_bandwidth(where)} if rank == 0 else {}
    transport.barrier()
    transport.close()
    return {"device_kind": where.type, **figures, **between}


class _Waiting(Protocol):
    """The part of a transport that a measurement needs."""

    def barrier(self) -> None:
        """Wait for every rank."""


def figures_of(
    ping: Callable[[torch.Tensor], None],
    add_up: Callable[[torch.Tensor], None],
    device: torch.device,
    transport: _Waiting,
    sizes: Sizes,
) -> dict[str, float]:
    """Return latency and bandwidths. ``ping``: sends a tensor there and back. ``add_up``: an all-reduce of it."""
    one_way = {size: _seconds(ping, size, rounds, device, transport) / 2 for size, rounds in sizes.rounds.items()}
    both = sizes.small, sizes.large
    summed = {size: _seconds(add_up, size, sizes.rounds[size], device, transport) for size in both}
    return {
        "latency_seconds": one_way[sizes.tiny],
        "bandwidth": _slope(one_way, sizes),
        "all_reduce_bandwidth": _slope(summed, sizes),
    }


def _seconds(
    exchange: Callable[[torch.Tensor], None], size: int, rounds: int, device: torch.device, transport: _Waiting
) -> float:
    """Return the median seconds of an exchange of ``size`` bytes."""
    tensor = torch.zeros(size // 4, device=device)
    times = []
    transport.barrier()
    for _ in range(_WARM_UP + rounds):
        start = time.perf_counter()
        exchange(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[_WARM_UP:])


def _slope(seconds: dict[int, float], sizes: Sizes) -> float:
    """Return bytes per second, from the difference of the two messages; from the large one if noise exceeds it."""
    more = seconds[sizes.large] - seconds[sizes.small]
    return (sizes.large - sizes.small) / more if more > 0 else sizes.large / seconds[sizes.large]


def _host_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of a copy in one direction, while another one runs in the other direction.

    On a CPU, both copies are within its memory.
    """
    size = 2**28 if device.type == "cuda" else 2**25
    hosts = [HostBuffer(size, pinned=device.type == "cuda") for _ in range(2)]
    there = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    for host in hosts:
        host.bytes.zero_()
    lanes = [lane_of(device, None) for _ in range(2)]
    pairs = (there[0], hosts[0].bytes), (hosts[1].bytes, there[1])
    times = []
    for _ in range(_COPY_WARM_UP + _COPY_ROUNDS):
        start = time.perf_counter()
        copies = [lane.copy(Instruction(Op.LOAD, 0, 0), [pair], []) for lane, pair in zip(lanes, pairs, strict=True)]
        for copy in copies:
            copy.synchronize()
        times.append(time.perf_counter() - start)
    for lane in lanes:
        lane.close()
    return size / statistics.median(times[_COPY_WARM_UP:])
