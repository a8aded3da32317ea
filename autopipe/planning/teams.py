"""Ranks that are teams (``--tensor-parallel``): their cluster, and the time of the sums over their members."""

from __future__ import annotations

import dataclasses
import math

from autopipe.errors import PlanError, counted
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.profile import Measurement, Profile
from autopipe.ir.teams.exchanged import Exchange, team_bytes
from autopipe.planning.clusters import with_estimated_times


def of_teams(cluster: Cluster, size: int) -> Cluster:
    """Return the cluster whose ranks are teams of ``size`` neighbouring devices of the innermost level.

    A team computes as fast as its slowest device. All its members send at once, over the links of outer levels that
    they share.

    Raises: PlanError if the devices of the innermost level cannot be divided into such teams.
    """
    if size == 1:
        return cluster
    inner, *outer = cluster.levels
    if inner.count % size:
        raise PlanError(
            f"--tensor-parallel {size} does not divide the {counted(inner.count, 'device')} of level {inner.name!r}: "
            "the members of a team exchange every layer's results, so they must be on its links",
            remedy="choose a divisor of that number, or --tensor-parallel auto",
        )
    levels = [dataclasses.replace(inner, count=inner.count // size)]
    for level in outer:
        shared = level.bandwidth / size, level.all_reduce_bandwidth / size
        levels.append(dataclasses.replace(level, bandwidth=shared[0], all_reduce_bandwidth=shared[1]))
    devices = cluster.devices
    if len(devices) > 1:
        devices = tuple(_slowest(devices[first : first + size]) for first in range(0, len(devices), size))
    within = dataclasses.replace(inner, count=size)
    return Cluster(tuple(levels), devices, cluster.source, cluster.host, within, cluster.cores / size)


def _slowest(devices: tuple[ClusterDevice, ...]) -> ClusterDevice:
    slowest = min(devices, key=lambda device: device.speed)
    memory = [device.memory_bytes for device in devices if device.memory_bytes]
    return dataclasses.replace(slowest, memory_bytes=min(memory, default=0))


def on_cluster(profile: Profile, cluster: Cluster) -> Profile:
    """Return the profile as the planner uses it: estimated for a datasheet, with the sums over the members of teams.

    Raises: PlanError if the times of a device with a datasheet cannot be estimated.
    """
    profile = with_estimated_times(profile, cluster)
    if cluster.within is None:
        return profile
    speed = cluster.speed_of(range(cluster.num_ranks))
    measurements = tuple(_with_sums(m, profile, cluster.within, speed) for m in profile.measurements)
    return dataclasses.replace(profile, measurements=measurements)


def _with_sums(measurement: Measurement, profile: Profile, within: Level, speed: float) -> Measurement:
    """Return a measurement whose nodes include their sums, which do not depend on the speed of the device."""
    costs = dict(measurement.costs)
    sizes = profile.graph.sizes(measurement.microbatch_size)
    for name, exchanges in team_bytes(profile.graph, sizes, within.count).items():
        forward, backward = (
            speed * math.fsum(ring_seconds(exchange, within) for exchange in each)
            for each in (exchanges.forward, exchanges.backward)
        )
        cost = costs[name]
        costs[name] = dataclasses.replace(
            cost,
            forward_seconds=cost.forward_seconds + forward,
            backward_seconds=cost.backward_seconds + backward,
        )
    return dataclasses.replace(measurement, costs=costs)


def ring_seconds(exchange: Exchange, level: Level) -> float:
    """Return the seconds of an exchange between the members of a level, by a ring.

    ``(t - 1) / t`` of the bytes pass each link, twice for a sum.
    """
    steps = exchange.passes * (level.count - 1)
    return steps / level.count * exchange.num_bytes / level.ring_bandwidth + steps * level.latency_seconds
