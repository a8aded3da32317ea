"""Groups, members and store operations of a rank among 512 and 4096, counted on torch's fake process group.

With S ranks in a pipeline, each R times (S * R ranks), and one stage on a rank::

    communicators of the run    2 (S - 1) R, each of 2 members     one in each direction between neighbours
    sums over replicas          S over NCCL and S over gloo, each of R members, if R > 1
    groups that a rank is in    at most 4 communicators, and both sums
    store operations of a rank  none: groups do not use the store until they connect

With several stages on a rank, the last rank of a pipeline is a neighbour of the first, too: 2 S R communicators.
"""

from __future__ import annotations

import functools
import math
import types
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.layouts import replicated
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopipe.ir.messages import MessagePlan, channels
from autopipe.ir.schedule import ScheduleSpec, StageEdges
from autopipe.runtime.transport import distributed, nccl
from autopipe.runtime.transport.communicators import MOST_GROUPS, Communicators
from autopipe.schedules import REGISTRY


class CountedStore(FakeStore):
    """A store that counts its operations and keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def set(self, *_: Any) -> None:
        """Count a write."""
        self.operations["set"] += 1

    def get(self, *_: Any) -> bytes:
        """Count a read."""
        self.operations["get"] += 1
        return b""

    def add(self, *_: Any) -> int:
        """Count an addition."""
        self.operations["add"] += 1
        return 1

    def wait(self, *_: Any) -> None:
        """Count a wait."""
        self.operations["wait"] += 1


class World:
    """``torch.distributed`` as one rank sees it, with the fake backend in place of gloo and NCCL."""

    ProcessGroupNCCL = types.SimpleNamespace(Options=lambda **options: None)

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.store = rank, CountedStore()
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.created = 0  # groups of torch
        dist.init_process_group("fake", store=self.store, rank=rank, world_size=world_size)

    def new_group(self, ranks: list[int], backend: str = "gloo", **_: Any) -> Any:
        """Create a group of torch, and count it."""
        self.calls.append((backend, tuple(ranks)))
        return dist.new_group(ranks, backend="fake")

    def isend(self, tensor: torch.Tensor, peer: int, group: Any = None, tag: int = 0) -> Any:
        """Return a complete send: the works of the fake backend never complete."""
        return types.SimpleNamespace(wait=lambda: True, is_completed=lambda: True)

    irecv = isend

    def all_reduce(self, *_: Any, **__: Any) -> Any:
        """Return a complete collective."""
        return types.SimpleNamespace(wait=lambda: True, is_completed=lambda: True)

    reduce_scatter_tensor = all_gather_into_tensor = all_reduce

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @property
    def members(self) -> list[tuple[str, tuple[int, ...]]]:
        """The groups that the rank is in."""
        return [call for call in self.calls if self.rank in call[1]]


@functools.cache
def connect(stage_ranks: tuple[tuple[int, ...], ...], rank: int) -> World:
    """Connect one rank as training does, and return what it asked of torch."""
    edges = StageEdges.chain(len(stage_ranks))
    messages = MessagePlan(dict.fromkeys(edges.forward, ("f",)), dict.fromkeys(edges.backward, ("b",)), ())
    request = ScheduleSpec(stage_ranks, math.lcm(*map(len, stage_ranks)))
    groups = sorted({ranks for ranks in stage_ranks if len(ranks) > 1})
    of = channels(messages, request)
    world = World(rank, request.num_ranks)
    stream = types.SimpleNamespace(synchronize=lambda: None)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for module in (distributed, nccl):
                patch.setattr(module, "dist", world)
            patch.setattr(torch.cuda, "current_stream", lambda device: stream)
            transport = distributed.ProcessTransport(
                of, groups, device=torch.device("cpu"), communicators=Communicators.of(of, groups)
            )
            world.created = len(dist.distributed_c10d._world.pg_map) - 1  # without the default group
            transport.close()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return world


@pytest.mark.parametrize("world_size", [512, 4096])
@pytest.mark.parametrize("schedule", sorted(REGISTRY))
def test_groups_of_every_schedule_and_number_of_replicas(schedule, world_size):
    kind = REGISTRY[schedule]
    for replicas in (1, 8, 64) if kind.replicas or kind.equal_replicas else (1,):
        for v in (1, 2) if kind.several_stages else (1,):
            ranks = world_size // replicas
            layout = tuple(tuple(range(s % ranks * replicas, (s % ranks + 1) * replicas)) for s in range(ranks * v))
            world = connect(layout, world_size // 2 + 1)
            calls = Counter(backend for backend, _ in world.calls)
            sums = ranks if replicas > 1 else 0
            assert calls["gloo"] == sums
            assert calls["nccl"] - sums == 2 * (ranks - 1 if v == 1 else ranks) * replicas
            sizes = Counter(len(members) for _, members in world.members)
            assert sizes == Counter({2: 4} | ({replicas: 2} if replicas > 1 else {}))
            assert world.created == len(world.members)  # torch creates nothing for the groups of other ranks
            assert not world.store.operations


@pytest.mark.parametrize(("counts", "communicators"), [((128, 384), 2 * 384), ((1024, 3072), 2 * 3072)])
def test_groups_of_unequal_replicas(counts, communicators):
    """Ranks of stages with 1 and 3 replicas for each other: three neighbours, and one neighbour."""
    for rank, pairs in ((0, 6), (sum(counts) - 1, 2)):
        world = connect(replicated(*counts), rank)
        assert Counter(backend for backend, _ in world.calls) == {"nccl": communicators + 2, "gloo": 2}
        assert sum(len(members) == 2 for _, members in world.members) == pairs
        assert sum(backend == "nccl" for backend, _ in world.members) <= MOST_GROUPS
        assert not world.store.operations


def test_operations_on_the_store_of_a_group_are_counted():
    store = CountedStore()
    dist.PrefixStore("group", store).add("key", 1)
    assert store.operations == {"add": 1}
