"""``Problem``: the seconds and bytes of every stage and pair of cuts, for one microbatch size, cluster and schedule.

The cost of a microbatch at stage k on atoms i..j-1, on a device of speed s::

    t_k(i, j) = (F + B + R) / s + c_in + c_out        F forward, B backward, R recomputed: 0, F, or that of the units
    c_in      = received / b(k-1, k) + 2 l(k-1, k)    b bandwidth, l latency of the link; nothing at the ends
    c_out     = sent / b(k, k+1) + 2 l(k, k+1)
    c_tied    = 2 tied / (m b)                        gradient and new value of tied trained weights, per minibatch

With d replicas of every stage, each pipeline runs m / d microbatches. What happens once a minibatch weighs d times as
much in one of them: c_tied is d times as large, and the replicas all-reduce their gradients g over a ring::

    c_reduce  = d/m (2 (d-1)/d g / b_ring + 2 (d-1) l_ring)

``received`` and ``sent`` count a value once for its producer and once for each reader, and its gradient likewise.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np

from autopipe.errors import PlanError
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.cuts import Cuts
from autopipe.ir.profile import Measurement, Profile
from autopipe.planning.cost.atoms import Atoms
from autopipe.planning.cost.block_sums import BlockTables
from autopipe.planning.cost.byte_sums import StageTerms
from autopipe.planning.cost.memory import in_flight, in_flight_of_interleaved, weight_versions
from autopipe.planning.cost.pair_sum import Array
from autopipe.planning.cost.tables import Sized, Tables, sized
from autopipe.planning.options import PlanOptions
from autopipe.schedules.kind import ScheduleKind

# the index of one pair of cuts in the tables, or ... for all of them
Pairs = tuple[int, int] | EllipsisType


@dataclass(frozen=True)
class Problem:
    """The data of one search, for one number of microbatches."""

    profile: Profile
    cluster: Cluster
    options: PlanOptions
    cuts: Cuts
    num_microbatches: int
    # False: the replicas of a stage are neighbouring ranks. True: the stages of a pipeline are.
    apart: bool = False
    needs: tuple[float, ...] = ()  # by stage: in which proportion stages divide the memory of a device; (): estimated

    @property
    def share(self) -> int:
        """The most microbatches of a minibatch that one of the replicas of every stage runs."""
        return math.ceil(self.num_microbatches / self.options.replicas)

    @property
    def sharing(self) -> int:
        """The number of replicas that divide the optimizer state, if no stage differs in its replicas; or 1."""
        return self.options.replicas if self.options.sharded else 1

    @property
    def kind(self) -> ScheduleKind:
        """The description of the schedule."""
        return self.options.schedule_kind

    @property
    def microbatch_size(self) -> int:
        """Samples in the largest microbatch."""
        return math.ceil(self.options.batch_size / self.num_microbatches)

    @functools.cached_property
    def sized(self) -> Sized:
        """The graph with these cuts at this microbatch size."""
        return sized(self.profile, self.cuts, self.microbatch_size)

    @property
    def measurement(self) -> Measurement:
        """The node costs at this microbatch size."""
        return self.sized.measurement

    @property
    def atoms(self) -> Atoms:
        """The graph, divided at the legal cuts, at this microbatch size."""
        return self.sized.atoms

    @property
    def tables(self) -> Tables:
        """The stage tables at this microbatch size."""
        return self.sized.tables

    @property
    def block_tables(self) -> BlockTables:
        """The stage tables of recompute by block."""
        return self.sized.block_tables

    @functools.cached_property
    def fastest_mode(self) -> str:
        """The first of ``modes``, without a search for units where there is no need for them."""
        if self.options.recompute == "auto" and not any(node.checkpoint for node in self.profile.graph.nodes):
            return "never"
        return self.modes[0]

    @functools.cached_property
    def modes(self) -> tuple[str, ...]:
        """The ways to recompute that a stage may use, the fastest first.

        A stage recomputes by block only if the graph has units, and the backward is not split: its second half would
        run every unit once more for each weight.
        """
        setting = self.options.recompute
        if setting in ("never", "stage"):
            return (setting,)
        units = None if self.kind.splits_backward else self.atoms.units
        if units is None or not units.spans:
            return ("stage",) if setting == "always" else ("never", "stage")
        if setting == "block":
            return ("block",)
        return ("block", "stage") if setting == "always" or units.of_user else ("never", "block", "stage")

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that run a stage: round robin if a rank runs several."""
        group, d, p = self.options.group_of(stage), self.options.replicas, self.options.num_groups
        return tuple(range(group, p * d, p) if self.apart else range(group * d, (group + 1) * d))

    def device_of(self, stage: int) -> ClusterDevice:
        """Return the device of a stage; of replicas, the one with the least memory."""
        devices = [self.cluster.device(rank) for rank in self.ranks_of(stage)]
        return min(devices, key=lambda device: device.memory_bytes or math.inf)

    def in_flight_and_versions(self, stage: int, num_stages: int) -> tuple[int, int]:
        """Return (microbatches in flight, weight versions) of a stage."""
        v, p = self.options.stages_per_rank, self.options.num_groups
        if self.kind.several_stages and self.kind.in_flight == "depth":
            # the smaller share may be run in larger rounds, of which more are in flight
            shares = {self.share, self.num_microbatches // self.options.replicas}
            count = max(in_flight_of_interleaved(v, p, share, stage) for share in shares)
        else:
            behind = num_stages - 1 - stage
            count = in_flight(self.kind, self.share, behind=behind, num_ranks=num_stages)
        return count, weight_versions(self.kind, self.num_microbatches, count)

    def transfer_seconds(self, stage: int, num_stages: int, at: Pairs = ...) -> Any:
        """Return c_in + c_out + c_tied + c_reduce of all pairs, or of one (i, j)."""
        total: Any = 0.0
        d, ranks = self.options.replicas, self.ranks_of(stage)
        tied = 2 * d * self.tables.tied_bytes[at] / self.num_microbatches
        charged = False
        amounts = self.tables.received, self.tables.sent
        for link, amount in zip(self._links(stage, num_stages), amounts, strict=True):
            if link is None:
                continue
            total = total + amount[at] / link.bandwidth + 2 * link.latency_seconds
            if not charged:
                total, charged = total + tied / link.bandwidth, True
        if d > 1:
            ring = self.cluster.span(ranks[0], ranks[-1])
            moved = 2 * (d - 1) / d * self.tables.memory.gradients[at]
            once = moved / ring.ring_bandwidth + 2 * (d - 1) * ring.latency_seconds
            # if the replicas divide the optimizer state, the new weights are exchanged like the gradients
            total = total + d * once * (1 + self.options.sharded) / self.num_microbatches
        return total

    def _links(self, stage: int, num_stages: int) -> tuple[Level | None, Level | None]:
        """Return the links to the stage before and the stage behind; None without one, or on the same ranks."""
        ranks = self.ranks_of(stage)
        links: list[Level | None] = []
        for other in (stage - 1, stage + 1):
            if not 0 <= other < num_stages or self.ranks_of(other) == ranks:
                links.append(None)
                continue
            pairs = zip(ranks, self.ranks_of(other), strict=True)
            links.append(min((self.cluster.link(a, b) for a, b in pairs), key=lambda level: level.bandwidth))
        return links[0], links[1]

    def _fastest_table(self, stage: int, num_stages: int) -> Array:
        """Return the seconds of all pairs with the fastest mode: the same array for stages with equal links."""
        ranks = self.ranks_of(stage)
        ring = self.cluster.span(ranks[0], ranks[-1]) if len(ranks) > 1 else None
        key: Any = (self.cluster.speed_of(ranks), self._links(stage, num_stages), ring)
        if self.fastest_mode == "block":
            key = (*key, self.in_flight_and_versions(stage, num_stages)[0] == 1)
        if key not in self._fastest_tables:
            self._fastest_tables[key] = self.stage_seconds(stage, num_stages, self.fastest_mode)
        return self._fastest_tables[key]

    @functools.cached_property
    def _fastest_tables(self) -> dict[Any, Array]:
        return {}

    @functools.cached_property
    def searched_as(self) -> tuple[Any, ...]:
        """What determines the best cuts, besides the tables."""
        options, cluster = self.options, self.cluster
        if any(device.memory_bytes for device in cluster.devices) or self.fastest_mode == "block":
            return (options, cluster, self.num_microbatches, self.apart, self.needs)
        layout = options.num_ranks, options.replicas, options.num_stages, options.stage_ranks, self.apart
        speeds = tuple(device.speed for device in cluster.devices)
        return (*layout, options.sharded, cluster.levels, speeds, self.num_microbatches, self.fastest_mode)

    def stage_seconds(self, stage: int, num_stages: int, mode: str, at: Pairs = ...) -> Any:
        """Return t_k of all pairs, or of one (i, j), with a recompute mode, whether they fit or not."""
        speed = self.cluster.speed_of(self.ranks_of(stage))
        transfer = self.transfer_seconds(stage, num_stages, at)
        forward, backward = self.tables.forward_seconds[at], self.tables.backward_seconds[at]
        plain = (forward + backward) / speed + transfer
        if mode == "never":
            return plain
        return plain + (forward if mode == "stage" else self._block_seconds(stage, num_stages, at)) / speed

    def _block_seconds(self, stage: int, num_stages: int, at: Pairs) -> Any:
        again = self.block_tables.again_seconds[at]
        keep_last = self.in_flight_and_versions(stage, num_stages)[0] == 1
        return again - self.block_tables.last_seconds[at] if keep_last else again

    def stage_peak(self, stage: int, num_stages: int, mode: str) -> Array:
        """Return the peak bytes of every pair with a recompute mode."""
        num_in_flight, versions = self.in_flight_and_versions(stage, num_stages)
        block = self.block_tables if mode == "block" else None
        return self.tables.memory.peak(num_in_flight, versions, mode, self.waiting(stage), block, self.sharing)

    def waiting(self, stage: int) -> int:
        """Return the most weight halves of backwards that wait on a stage: s on stage s, and the one that arises.

        Stage 0 sends no gradient, so its backward has no first half (zero bubble, arXiv:2401.10241, section 2).
        """
        return min(stage + 1, self.share) if self.kind.splits_backward and stage else 0

    def limit(self, stage: int) -> float:
        """Return the whole bytes that a stage may use; infinite if the device has no limit.

        Stages that share a device divide it in proportion to the peaks that they would have if all stages of the model
        were equal, with the first recompute mode with which those fit, or of ``needs``.
        """
        memory = self.device_of(stage).memory_bytes
        if not memory:
            return math.inf
        group, count = self.options.group_of(stage), self.options.num_stages
        if self.options.stages_on(group) == 1:
            return memory
        same = [other for other in range(count) if self.options.group_of(other) == group]
        peaks: dict[int, float] = {other: self.needs[other] for other in same} if self.needs else {}
        for mode in () if self.needs else self.modes:
            peaks = {other: self._peak_if_equal(other, count, mode) for other in same}
            if sum(peaks.values()) <= memory * count:
                break
        total = sum(peaks.values())
        return memory * peaks[stage] // total if total else memory // len(same)

    @functools.cached_property
    def _whole(self) -> StageTerms:
        """The bytes of the whole model as one stage, without recompute by block."""
        return self.sized.terms([0])[0]

    @functools.cached_property
    def _whole_by_block(self) -> StageTerms:
        return self.sized.terms([0], by_block=True)[0]

    def _peak_if_equal(self, stage: int, num_stages: int, mode: str) -> int:
        """Return the peak of the whole model with as many microbatches in flight as a stage has."""
        num_in_flight, versions = self.in_flight_and_versions(stage, num_stages)
        whole = self._whole_by_block if mode == "block" else self._whole
        return whole.peak(num_in_flight, versions, mode, self.waiting(stage), self.sharing)

    def stage_table(self, stage: int, num_stages: int) -> Array:
        """Return t_k with the first mode that fits, infinite where none does."""
        limit = self.limit(stage)
        table = self._fastest_table(stage, num_stages)
        if math.isinf(limit):
            return table
        fits = self.stage_peak(stage, num_stages, self.fastest_mode) <= limit
        if fits.all():
            return table
        for mode in self.modes[1:]:
            if fits.all():
                return table
            table = np.where(fits, table, self.stage_seconds(stage, num_stages, mode))
            fits |= self.stage_peak(stage, num_stages, mode) <= limit
        return np.where(fits, table, np.inf)

    def overflow_table(self, stage: int, num_stages: int) -> Array:
        """Return the bytes by which the least peak that the options allow exceeds the limit; negative if it fits."""
        peaks = [self.stage_peak(stage, num_stages, mode) for mode in self.modes]
        over: Array = functools.reduce(np.minimum, peaks) - self.limit(stage)
        return over


def check_cluster(cluster: Cluster, num_ranks: int) -> None:
    """Check that the cluster has enough ranks. Raises: PlanError."""
    if cluster.num_ranks < num_ranks:
        levels = " x ".join(f"{level.count} ({level.name})" for level in cluster.levels)
        raise PlanError(
            f"{num_ranks} ranks requested, but the cluster has {cluster.num_ranks}: {levels}",
            remedy=f"use at most {cluster.num_ranks} ranks, or describe a larger cluster",
        )
