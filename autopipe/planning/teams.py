"""Ranks that are teams (``--tensor-parallel``): their cluster."""

from __future__ import annotations

import dataclasses

from autopipe.errors import PlanError, counted
from autopipe.ir.cluster import Cluster, ClusterDevice
from autopipe.ir.profile import Profile
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
    return Cluster(tuple(levels), devices, cluster.source, cluster.host, within)


def _slowest(devices: tuple[ClusterDevice, ...]) -> ClusterDevice:
    slowest = min(devices, key=lambda device: device.speed)
    memory = [device.memory_bytes for device in devices if device.memory_bytes]
    return dataclasses.replace(slowest, memory_bytes=min(memory, default=0))


def on_cluster(profile: Profile, cluster: Cluster) -> Profile:
    """Return the profile as the planner uses it: estimated for a datasheet.

    Raises: PlanError if the times of a device with a datasheet cannot be estimated.
    """
    return with_estimated_times(profile, cluster)
