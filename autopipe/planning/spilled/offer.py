"""What spilling can do where it is not requested, or what it costs where it is: one sentence, and a comparison."""

from __future__ import annotations

import dataclasses
import math

from autopipe.errors import DoesNotFitError, PlanError
from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.planning.api import make_plan
from autopipe.planning.compare import SINGLE, THIS, Comparison, Contender
from autopipe.planning.cost.peaks import search_within_memory
from autopipe.planning.options import PlanOptions
from autopipe.planning.scores import simulator_score
from autopipe.schedules.spilling.spilled import KIND


def with_offer(refusal: DoesNotFitError, profile: Profile, cluster: Cluster, options: PlanOptions) -> DoesNotFitError:
    """Return a refusal that names spilling too, if a plan that spills fits, with how much longer it takes."""
    if options.schedule == KIND.name:
        return refusal
    wanted = dataclasses.replace(
        _on_one_device(options), schedule=KIND.name, kind=None, recompute="auto", schedule_options=(), schedule_text=""
    )
    try:
        plan = make_plan(profile, cluster, wanted)
    except PlanError:
        return refusal
    alone = _unlimited(profile, cluster, options)
    times = "" if alone is None else f": {_times(plan, alone):.2g} times as long as on one device with enough memory"
    offer = f"or keep the weights on the host (--schedule spilled --gpus 1){times}"
    remedy = f"{refusal.remedy}, {offer}" if refusal.remedy else offer
    return DoesNotFitError(refusal.what, where=refusal.where, remedy=remedy)


def comparison_of_spilled(plan: Plan, profile: Profile, cluster: Cluster, options: PlanOptions) -> Comparison:
    """Return a spilled plan beside the best plan on one device without spilling, if that fits."""
    line = dataclasses.replace(_on_one_device(options), schedule="1f1b", kind=None, schedule_options=())
    score = simulator_score(profile, cluster, [line])
    try:
        alone = search_within_memory(profile, cluster, lambda room: make_plan(profile, room, line, score=score))
    except PlanError as error:
        single = Contender(SINGLE, None, error.what)
        free = _unlimited(profile, cluster, options)
        text = "Without spilling, the model does not fit."
        if free is not None:
            text += f" A step takes {_times(plan, free):.2g} times as long as on one device with enough memory."
    else:
        single = Contender(SINGLE, alone)
        text = f"The model fits without spilling: --schedule 1f1b takes {1 / _times(plan, alone):.0%} of the time."
    return Comparison((single, Contender(THIS, plan)), text, plan)


def _on_one_device(options: PlanOptions) -> PlanOptions:
    return dataclasses.replace(
        options, num_ranks=1, stages_per_rank=1, may_replicate=False, replicas=1, stage_ranks=(), offered=0
    )


def _unlimited(profile: Profile, cluster: Cluster, options: PlanOptions) -> Plan | None:
    """Return the fastest plan on one device of the cluster with any memory."""
    device = dataclasses.replace(cluster.device(0), memory_bytes=0)
    line = dataclasses.replace(_on_one_device(options), schedule="1f1b", kind=None, schedule_options=())
    try:
        return make_plan(profile, dataclasses.replace(cluster, devices=(device,)), line)
    except PlanError:  # the batch does not have the microbatches that are requested
        return None


def _times(plan: Plan, other: Plan) -> float:
    rate = plan.predicted.samples_per_second
    return other.predicted.samples_per_second / rate if rate else math.inf
