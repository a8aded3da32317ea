"""The peak bytes of a plan's stages, messages included, and the search for a plan whose peaks fit.

The search knows a stage by its cuts alone, and counts what is in flight by a formula. A plan is counted here anew: its
schedule is followed instruction by instruction, with every message that is received ahead (``schedules.memory``). Where
that is more than a device has, the search is repeated with as much less memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable

from autopipe.errors import PlanError
from autopipe.ir.cluster import Cluster
from autopipe.ir.cuts import Cuts
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.planning.memory import gib, recount
from autopipe.planning.ownership import state_of_stages
from autopipe.runtime.routes import Routes
from autopipe.schedules import REGISTRY, MessageBytes, StageBytes, lower, stage_peaks
from autopipe.workflow.predict import MOST_SIMULATED_ONCE, WINDOW, message_bytes, schedule_of

MOST_SEARCHES = 6


def with_peaks(plan: Plan, profile: Profile) -> Plan:
    """Return the plan with the peaks of its stages counted along its schedule; one too large for that as it is."""
    if plan.num_ranks * plan.num_microbatches > MOST_SIMULATED_ONCE:
        return plan
    graph, cuts, measurement = profile.graph, Cuts(profile.graph), profile.at(plan.microbatch_size)
    positions = [stage.start for stage in plan.stages[1:]]
    edges = (*(stage.start for stage in plan.stages), len(graph.nodes))
    state = state_of_stages(graph, cuts, positions)
    routes, schedule = Routes.of(plan, graph), schedule_of(plan)
    # a stage that sends no gradient back has no first half: all of its backward waits
    halved = {source for source, _ in routes.backward} if REGISTRY[plan.schedule].splits_backward else set()
    sizes = []
    for stage in plan.stages:
        counted = recount(
            graph,
            cuts,
            measurement,
            optimizer_bytes_per_byte=profile.optimizer_bytes_per_byte,
            edges=edges,
            index=stage.index,
            state=state,
        )
        half = stage.index in halved
        fixed = counted.optimizer + (counted.workspace_half if half else counted.workspace_whole)
        sizes.append(
            StageBytes(
                fixed + (counted.saved if stage.recompute else 0),
                counted.weights,
                counted.kept + (0 if stage.recompute else counted.saved),
                counted.between if half else 0,
                counted.gradients,
            )
        )
    if any(schedule.staleness):
        schedule = schedule_of(plan, WINDOW)
    held = message_bytes(plan, profile, routes)
    messages = MessageBytes({e: held[e] for e in routes.forward}, {e: held[e] for e in routes.backward})
    peaks = stage_peaks(lower(schedule, routes.traffic), sizes, messages)
    stages = (dataclasses.replace(s, peak_bytes=peak) for s, peak in zip(plan.stages, peaks, strict=True))
    return dataclasses.replace(plan, stages=tuple(stages))


def fitting(profile: Profile, cluster: Cluster, find: Callable[[Cluster], Plan]) -> Plan:
    """Return the first plan that fits the cluster's memory when its peaks are counted, each search with less memory.

    Raises: PlanError where none was found.
    """
    room = cluster
    for _ in range(MOST_SEARCHES):
        plan = with_peaks(find(room), profile)
        share, rank, needed = _fullest(plan, cluster)
        if share <= 1:
            return plan
        devices = (dataclasses.replace(d, memory_bytes=math.ceil(d.memory_bytes / share)) for d in room.devices)
        room = dataclasses.replace(room, devices=tuple(devices))
    raise PlanError(
        f"no plan fits: the last of {MOST_SEARCHES} needs {gib(needed)} on rank {rank}, messages included, and "
        f"{gib(cluster.device(rank).memory_bytes)} are available",
        remedy="more ranks, smaller microbatches, or a schedule with fewer of them in flight",
    )


def _fullest(plan: Plan, cluster: Cluster) -> tuple[float, int, int]:
    """Return the share of its memory that the fullest rank needs (0.0 without limits), the rank, and its bytes."""
    used: Counter[int] = Counter()
    for stage in plan.stages:
        used.update(dict.fromkeys(stage.ranks, stage.peak_bytes))
    limits = {rank: cluster.device(rank).memory_bytes for rank in used}
    return max((used[rank] / limit if limit else 0.0, rank, used[rank]) for rank, limit in limits.items())
