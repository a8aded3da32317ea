"""The remedy for a rank that is out of memory: the smallest change that fits, found by planning with less memory.

The ratio of needed to predicted memory is assumed to be the same for every plan. So the planner may use the available
memory divided by this ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopipe.commands.prepared import Prepared
from autopipe.errors import AutopipeError, WorkerError, counted
from autopipe.ir.plan import Plan
from autopipe.planning import PlanOptions, make_plan
from autopipe.planning.cost.peaks import search_within_memory
from autopipe.planning.teams import on_cluster
from autopipe.schedules import REGISTRY
from autopipe.units import as_size_option

_MARGIN = 0.95


def limit_of(figures: Mapping[str, int]) -> int:
    """Return the largest predicted memory for which the real need fits."""
    needed = max(figures["used"] + figures["requested"], figures["predicted"], 1)
    return int(_MARGIN * figures["available"] * min(figures["predicted"] / needed, 1.0))


def advise(error: WorkerError, prepared: Prepared) -> None:
    """Set the remedy of an out-of-memory error to the smallest change that fits. Other errors are not changed."""
    if error.out_of_memory:
        error.remedy = _remedy(limit_of(error.out_of_memory), prepared)


def _remedy(limit: int, prepared: Prepared) -> str:
    plan = prepared.plan
    devices = tuple(replace(device, memory_bytes=limit) for device in prepared.cluster.devices)
    counts = {stage.replicas for stage in plan.stages}
    equal = REGISTRY[plan.schedule].equal_replicas
    options = PlanOptions(
        num_ranks=plan.num_ranks,
        batch_size=plan.batch_size,
        num_microbatches=plan.num_microbatches,
        schedule=plan.schedule,
        stages_per_rank=plan.schedule_options.get("stages_per_rank", 1),
        may_replicate=counts != {1} and not equal,
        replicas=max(counts) if equal else 1,
        schedule_options=tuple(plan.schedule_options.items()),
        sharded=plan.shard_optimizer,
        exact_ties=prepared.record.request.exact_ties or "auto",
    )
    memory = f"--gpu-memory {as_size_option(limit)}"
    try:
        room = replace(prepared.cluster, devices=devices)
        profile = on_cluster(prepared.profile, room)
        smaller = search_within_memory(profile, room, lambda least: make_plan(profile, least, options))
    except AutopipeError as error:
        return f"{error.remedy}; plan for it with {memory}"
    return f"{memory}: then {_difference(plan, smaller)}"


def _difference(before: Plan, after: Plan) -> str:
    """Return a description of the change that makes the second plan fit."""
    again = [stage.index for stage in after.stages if stage.recompute != "never"]
    if again and again != [stage.index for stage in before.stages if stage.recompute != "never"]:
        return f"{counted(len(again), 'stage')} of {len(after.stages)} recompute their forward to save memory"
    return "other cuts fit, with the same numbers of ranks and microbatches"
