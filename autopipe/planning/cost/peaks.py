"""The peak bytes of a plan's stages, messages included, and the search for a plan whose peaks fit.

The search knows a stage by its cuts alone, and counts what is in flight by a formula. Here a plan is counted again: its
schedule is followed instruction by instruction, with every message that is received ahead (``schedules.memory``). Where
that is more than a device has, the search is repeated with less room there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from autopipe.errors import PlanError, counted
from autopipe.ir.cluster import Cluster
from autopipe.ir.cuts import Cuts
from autopipe.ir.messages import MessagePlan
from autopipe.ir.plan import Plan, bytes_by_rank
from autopipe.ir.profile import Profile
from autopipe.ir.schedule import Op, Schedule
from autopipe.planning.cost.atoms import Atoms
from autopipe.planning.cost.backward import backward_bytes
from autopipe.planning.cost.byte_sums import ByteSums
from autopipe.planning.cost.predict import MOST_SIMULATED_ONCE, WINDOW, message_bytes, schedule_of
from autopipe.schedules import MessageBytes, StageBytes, lower, stage_peaks
from autopipe.units import in_bytes, in_short_bytes

MOST_SEARCHES = 6


def with_peaks(plan: Plan, profile: Profile, *, most: float = MOST_SIMULATED_ONCE) -> Plan:
    """Return the plan with the peaks of its stages counted along its schedule; one too large for that as it is.

    ``most``: the pairs of rank and microbatch that are followed.
    """
    size = plan.num_ranks * plan.num_microbatches
    if size > most:
        return plan
    schedule = schedule_of(plan)
    if any(schedule.staleness):
        # until the pipeline is full of microbatches and versions
        window = max(WINDOW, max(schedule.staleness) + 2)
        if size * window > most:
            return plan
        schedule = schedule_of(plan, window)
    message_plan = MessagePlan.of(plan, profile.graph)
    sent = message_bytes(plan, profile, message_plan)
    messages = MessageBytes({e: sent[e] for e in message_plan.forward}, {e: sent[e] for e in message_plan.backward})
    sizes = _sizes(plan, profile, _halved(schedule, message_plan))
    peaks = stage_peaks(lower(schedule, message_plan.edges), sizes, messages)
    stages = (dataclasses.replace(s, peak_bytes=peak) for s, peak in zip(plan.stages, peaks, strict=True))
    return dataclasses.replace(plan, stages=tuple(stages))


def _halved(schedule: Schedule, message_plan: MessagePlan) -> set[int]:
    """Return the stages whose backward has a first half: those that send a gradient back have one."""
    split = {i.stage for row in schedule.rows for i in row if i.op == Op.BACKWARD_INPUTS}
    return split & {source for source, _ in message_plan.backward}


def _sizes(plan: Plan, profile: Profile, halved: set[int]) -> list[StageBytes]:
    atoms = Atoms(profile.graph, Cuts(profile.graph), profile.at(plan.microbatch_size))
    starts = [stage.start for stage in plan.stages]
    every = ByteSums(atoms, profile.optimizer_bytes_per_byte).along(starts)
    sizes = []
    for stage, terms, backward in zip(plan.stages, every, backward_bytes(atoms, starts), strict=True):
        half = stage.index in halved
        workspace = backward.half if half else backward.whole
        sizes.append(
            StageBytes(
                fixed=terms.optimizer + workspace + (terms.saved if stage.recompute else 0),
                version=terms.weights,
                in_flight=terms.kept + (backward.replayed if stage.recompute else terms.saved),
                between=terms.between if half else 0,
                gradients=terms.gradients,
                first=max(backward.first - workspace, 0),
            )
        )
    return sizes


def search_within_memory(
    profile: Profile, cluster: Cluster, find: Callable[[Cluster], Plan], stopped: Callable[[], bool] = lambda: False
) -> Plan:
    """Return the first plan whose peaks, counted, fit the cluster's memory; each search has less room than the last.

    ``find``: a search, by the planner's formula. ``stopped``: whether it was interrupted; then none follows.

    Raises: PlanError if no plan fits.
    """
    room = cluster
    refused: PlanError | None = None
    for _ in range(MOST_SEARCHES):
        try:
            candidate = find(room)
        except PlanError as none:
            raise refused or none from None
        plan = with_peaks(candidate, profile)
        over = over_limit(plan, cluster)
        if not over:
            return plan
        rank = worst(over, cluster)
        more = over[rank] - cluster.device(rank).memory_bytes
        refused = PlanError(
            f"no plan fits: the best one found needs {in_short_bytes(over[rank])} on rank {rank}, messages included, "
            f"{in_short_bytes(more)} more than there is",
            remedy="use more ranks, smaller microbatches or a schedule with fewer of them in flight; with --recompute "
            "auto (the default) a stage recomputes where it must",
        )
        if stopped():
            break
        room = _less(room, cluster, bytes_by_rank(candidate.stages), over)
    assert refused is not None
    raise refused


def over_limit(plan: Plan, cluster: Cluster) -> dict[int, int]:
    """Return what the ranks need that need more than they have."""
    used = bytes_by_rank(plan.stages)
    return {rank: used[rank] for rank in used if 0 < cluster.memory_of(rank) < used[rank]}


def worst(over: Mapping[int, int], cluster: Cluster) -> int:
    """Return the rank that lacks the largest part of what it has."""
    return max(over, key=lambda rank: over[rank] / cluster.memory_of(rank))


def memory_shortfall(plan: Plan, cluster: Cluster) -> str:
    """Return in words which ranks would run out of memory, "" where all stages fit."""
    over = over_limit(plan, cluster)
    if not over:
        return ""
    rank = worst(over, cluster)
    there = cluster.memory_of(rank)
    others = f" (so it is on {counted(len(over) - 1, 'other rank')} too)" if len(over) > 1 else ""
    return (
        f"it does not fit: with {plan.schedule} rank {rank} needs {in_bytes(over[rank])}, and the plan is for devices "
        f"of {in_bytes(there)}, {in_bytes(over[rank] - there)} less{others}"
    )


def _less(room: Cluster, cluster: Cluster, used: Mapping[int, int], over: Mapping[int, int]) -> Cluster:
    """Return the room for the next search: so much that by the formula the plan that was ``over`` does not fit again.

    ``used``: what the formula says that the plan needs; ``over``: what it needs, on the ranks where that is too much.
    """
    devices = list(room.devices)
    for rank, needed in over.items():
        place = rank if len(devices) > 1 else 0
        least = min(used[rank] * cluster.device(rank).memory_bytes // needed, devices[place].memory_bytes - 1)
        devices[place] = dataclasses.replace(devices[place], memory_bytes=max(least, 1))
    return dataclasses.replace(room, devices=tuple(devices))
