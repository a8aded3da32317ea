"""Which channels share a communicator of NCCL, and which go through the host.

Each communicator takes device memory, connections and one CUDA stream of the 32 that torch hands out in turn. Two
communicators on one stream can deadlock. So a rank is in few of them: all activations and gradients from one rank to
another share one, and their receives are posted in the order of the sends (``schedules.lower``).

Ranks of neighbouring stages have a communicator while there are streams for it. A pair of ranks that only skips stages
gets one while both are in fewer than ``MOST_GROUPS``. The messages of the others go through host memory and gloo.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopipe.ir.messages import ACTIVATION, FIGURES, GRADIENT, Channel

MOST_GROUPS = 8
"""Communicators of a rank, if no stage has neighbours on many ranks."""

STREAMS = 32
"""CUDA streams in torch's pool, see c10/cuda/CUDAStream.h. The first two are left to torch and the user's code."""

_LIMIT = STREAMS - 2


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """Messages from one rank to another that are transferred in one order."""

    purpose: str  # "stages", or the kind and the stages of the only channel
    from_rank: int
    to_rank: int

    @staticmethod
    def of(channel: Channel) -> Pair:
        """Return the pair of a channel. Only activations and gradients share one: ``posts`` orders nothing else."""
        alone = f"{channel.kind} {channel.from_stage} {channel.to_stage}"
        purpose = "stages" if channel.kind in (ACTIVATION, GRADIENT) else alone
        return Pair(purpose, channel.from_rank, channel.to_rank)


@dataclass(frozen=True, slots=True)
class Communicators:
    """The communicators of a run, the same on every rank."""

    pairs: tuple[Pair, ...]  # in the order in which they are created
    on_host: tuple[Pair, ...]  # those without a communicator
    groups: tuple[tuple[int, ...], ...]  # sets of ranks that compute sums on GPUs, created before the pairs

    @staticmethod
    def of(channels: Iterable[Channel], groups: Sequence[Sequence[int]]) -> Communicators:
        """Choose the pairs with a communicator. ``groups``: the sets of ranks that compute sums on GPUs."""
        distances: dict[Pair, float] = {}
        for channel in channels:
            if channel.kind not in FIGURES:
                pair = Pair.of(channel)
                distances[pair] = min(distances.get(pair, math.inf), abs(channel.to_stage - channel.from_stage))
        members = Counter(rank for group in groups for rank in group)
        chosen: list[Pair] = []
        for pair in sorted(distances, key=lambda pair: (distances[pair], pair)):
            ends = (pair.from_rank, pair.to_rank)
            most = _LIMIT if distances[pair] == 1 and pair.purpose == "stages" else MOST_GROUPS
            if all(members[rank] < most for rank in ends):
                members.update(ends)
                chosen.append(pair)
        on_host = tuple(sorted(set(distances) - set(chosen)))
        return Communicators(tuple(sorted(chosen)), on_host, tuple(sorted(map(tuple, groups))))

    @property
    def note(self) -> str:
        """A sentence about the pairs without a communicator."""
        total = len(self.on_host) + len(self.pairs)
        return (
            f"the messages of {len(self.on_host)} of {total} pairs of ranks go through host memory: a rank is in at "
            f"most {MOST_GROUPS} communicators, or {_LIMIT} if its neighbouring stages need them"
        )
