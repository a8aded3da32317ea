"""The peak bytes of the stages of a plan along its schedule, and the search for a plan whose peaks fit.

A search knows only the cuts of a stage, and computes microbatches in flight by a formula. ``with_peaks`` follows the
schedule of a finished plan, instruction by instruction, with every message that is received early
(``schedules.memory``). The terms of a stage are the same (``byte_sums``). If a peak exceeds the memory of its device,
``search_within_memory`` searches again with less memory there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from autopipe.errors import DoesNotFitError, PlanError, counted
from autopipe.ir.cluster import Cluster
from autopipe.ir.cuts import Cuts
from autopipe.ir.messages import MessagePlan, message_bytes
from autopipe.ir.plan import Plan, bytes_by_rank
from autopipe.ir.profile import Profile
from autopipe.ir.schedule import Op, Schedule
from autopipe.planning.cost.atoms import Atoms, Units
from autopipe.planning.cost.backward import backward_bytes
from autopipe.planning.cost.block_sums import BlockSums
from autopipe.planning.cost.byte_sums import ByteSums
from autopipe.planning.cost.pair_sum import stored_values
from autopipe.planning.cost.predict import MOST_SIMULATED_ONCE, WINDOW, schedule_of
from autopipe.planning.spilled.costs import peaks_of
from autopipe.schedules import REGISTRY, MessageBytes, StageBytes, lower, stage_peaks
from autopipe.units import in_bytes, in_short_bytes

MOST_SEARCHES = 6


def with_peaks(plan: Plan, profile: Profile, *, most: float = MOST_SIMULATED_ONCE) -> Plan:
    """Return the plan with the peaks of its stages along its schedule.

    A plan with more than ``most`` pairs of a rank and a microbatch is returned unchanged.
    """
    size = plan.num_ranks * plan.num_microbatches
    if size > most:
        return plan
    if REGISTRY[plan.schedule].spills:
        return _with_stage_peaks(plan, peaks_of(plan, profile))
    schedule = schedule_of(plan)
    if any(schedule.staleness):
        # until the pipeline is full of microbatches and versions
        window = max(WINDOW, max(schedule.staleness) + 2)
        if size * window > most:
            return plan
        schedule = schedule_of(plan, window)
    message_plan = MessagePlan.of(plan, profile.graph)
    sent = message_bytes(plan, profile.graph, message_plan)
    messages = MessageBytes({e: sent[e] for e in message_plan.forward}, {e: sent[e] for e in message_plan.backward})
    sizes = _sizes(plan, profile, _halved(schedule, message_plan))
    return _with_stage_peaks(plan, stage_peaks(lower(schedule, message_plan.edges), sizes, messages))


def _with_stage_peaks(plan: Plan, peaks: Sequence[int]) -> Plan:
    stages = (dataclasses.replace(s, peak_bytes=peak) for s, peak in zip(plan.stages, peaks, strict=True))
    return dataclasses.replace(plan, stages=tuple(stages))


def _halved(schedule: Schedule, message_plan: MessagePlan) -> set[int]:
    """Return the stages whose backward is split: those that send a gradient back."""
    split = {i.stage for row in schedule.rows for i in row if i.op == Op.BACKWARD_INPUTS}
    return split & {source for source, _ in message_plan.backward}


def _sizes(plan: Plan, profile: Profile, halved: set[int]) -> list[StageBytes]:
    atoms = Atoms(profile.graph, Cuts(profile.graph), profile.at(plan.microbatch_size))
    starts = [stage.start for stage in plan.stages]
    every = ByteSums(atoms, profile.optimizer_bytes_per_byte).along(starts)
    # the units of the plan: its last stage may not recompute the last one
    atom_at = {position: atom for atom, position in enumerate(atoms.edges)}
    spans = [(atom_at[first], atom_at[behind]) for stage in plan.stages for first, behind in stage.units]
    blocks = BlockSums(atoms, Units(tuple(spans)), stored_values(atoms))
    by_block = blocks.along([*(atom_at[start] for start in starts), atoms.count])
    workspaces = backward_bytes(atoms, starts, [stage.units for stage in plan.stages], blocks.inside)
    sizes = []
    for stage, terms, (crossing, _), backward in zip(plan.stages, every, by_block, workspaces, strict=True):
        kept = {"never": terms.saved, "block": crossing + backward.replayed, "stage": backward.replayed}
        half = stage.index in halved
        workspace = backward.half if half else backward.whole
        sizes.append(
            StageBytes(
                fixed=terms.optimizer_on(plan.sharing(stage))
                + workspace
                + (terms.saved if stage.recompute == "stage" else 0),
                version=terms.weights,
                in_flight=terms.kept + kept[stage.recompute],
                between=terms.between if half else 0,
                gradients=terms.gradients,
                first=max(backward.first - workspace, 0),
            )
        )
    return sizes


def search_within_memory(
    profile: Profile, cluster: Cluster, find: Callable[[Cluster], Plan], stopped: Callable[[], bool] = lambda: False
) -> Plan:
    """Return the first plan whose peaks fit the cluster's memory. Each search has less memory than the one before.

    ``find``: a search with the memory of a cluster. ``stopped``: whether it was interrupted; then none follows.

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
        refused = DoesNotFitError(
            f"no plan fits: the best one needs {in_short_bytes(over[rank])} on rank {rank}, with its messages: "
            f"{in_short_bytes(more)} more than its device has",
            remedy="use more ranks, smaller microbatches or a schedule with fewer of them in flight; with --recompute "
            "auto (the default), a stage recomputes if it must",
        )
        if stopped():
            break
        room = _with_less_memory(room, cluster, bytes_by_rank(candidate.stages), over)
    assert refused is not None
    raise refused


def over_limit(plan: Plan, cluster: Cluster) -> dict[int, int]:
    """Return the bytes that ranks need, of the ranks that need more than they have."""
    used = bytes_by_rank(plan.stages)
    return {rank: used[rank] for rank in used if 0 < cluster.memory_of(rank) < used[rank]}


def worst(over: Mapping[int, int], cluster: Cluster) -> int:
    """Return the rank whose need exceeds its memory by the largest factor."""
    return max(over, key=lambda rank: over[rank] / cluster.memory_of(rank))


def memory_shortfall(plan: Plan, cluster: Cluster) -> str:
    """Return a sentence on the ranks that would run out of memory; "" if all stages fit."""
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


def _with_less_memory(room: Cluster, cluster: Cluster, used: Mapping[int, int], over: Mapping[int, int]) -> Cluster:
    """Return the cluster for the next search, with so little memory that the last plan does not fit by the formula.

    ``used``: the bytes of the last plan by the formula; ``over``: its peaks, on the ranks where they are too high.
    """
    devices = list(room.devices)
    for rank, needed in over.items():
        place = rank if len(devices) > 1 else 0
        least = min(used[rank] * cluster.device(rank).memory_bytes // needed, devices[place].memory_bytes - 1)
        devices[place] = dataclasses.replace(devices[place], memory_bytes=max(least, 1))
    return dataclasses.replace(room, devices=tuple(devices))
