"""What spilling can do where it is not requested, what it costs where it is, and what bounds each of its stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopipe.errors import DoesNotFitError, PlanError
from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.planning.api import make_plan
from autopipe.planning.compare import SINGLE, THIS, Comparison, Contender
from autopipe.planning.cost.peaks import search_within_memory
from autopipe.planning.cost.predict import costs_of
from autopipe.planning.options import PlanOptions
from autopipe.planning.simulated_scores import simulator_score
from autopipe.schedules.costs import Costs
from autopipe.schedules.spilling.spill import KIND, MESSAGES
from autopipe.units import in_seconds

COMPUTE, TO_DEVICE, TO_HOST = "computation", "copies to the device", "copies to the host"


@dataclass(frozen=True, slots=True)
class StageBound:
    """What overlaps with the forwards, or the backwards, of one stage in a minibatch, in seconds."""

    stage: str
    part: str  # forward, backward
    seconds: Mapping[str, float]  # of the computation, and of the copies in either direction

    @property
    def bound(self) -> str:
        """What takes longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    def __str__(self) -> str:
        """Return one line of text."""
        times = ", ".join(f"{name} {in_seconds(seconds)}" for name, seconds in self.seconds.items())
        return f"{self.part} of {self.stage}: {times}; bound by {self.bound}"


def bounds_of(plan: Plan, profile: Profile, cluster: Cluster) -> tuple[StageBound, ...]:
    """Return the bounds of all stages, first of the forwards, then of the backwards.

    While a stage computes, the weights of the next one are copied to the device, and what the stage before has changed
    is copied to the host.
    """
    costs, m, count = costs_of(plan, profile, cluster), plan.num_microbatches, len(plan.stages)
    bounds = []
    for stage in plan.stages:
        k = stage.index
        following = costs.spill[k + 1].weights if k + 1 < count else 0.0
        forward = {
            COMPUTE: m * costs.stages[k].forward_seconds,
            TO_DEVICE: following + _messages(costs, plan, k, "activations_in"),
            TO_HOST: _messages(costs, plan, k, "activations_out"),
        }
        bounds.append(StageBound(stage.label, "forward", forward))
    for stage in reversed(plan.stages):
        k = stage.index
        following = costs.spill[k - 1].weights if k else 0.0
        backward = {
            COMPUTE: m * costs.stages[k].backward_seconds + costs.stages[k].step_seconds,
            TO_DEVICE: costs.spill[k].optimizer
            + following
            + _messages(costs, plan, k, "activations_in", "gradients_in"),
            TO_HOST: (costs.spill[k + 1].weights + costs.spill[k + 1].optimizer if k + 1 < count else 0.0)
            + _messages(costs, plan, k, "gradients_out"),
        }
        bounds.append(StageBound(stage.label, "backward", backward))
    return tuple(bounds)


def _messages(costs: Costs, plan: Plan, stage: int, *names: str) -> float:
    if not plan.schedule_options.get(MESSAGES.name):
        return 0.0
    return plan.num_microbatches * math.fsum(getattr(costs.spill[stage], name) for name in names)


def limit_of(bounds: tuple[StageBound, ...]) -> str:
    """Return what bounds most of a minibatch, in words."""
    total: dict[str, float] = {}
    for bound in bounds:
        total[bound.bound] = total.get(bound.bound, 0.0) + bound.seconds[bound.bound]
    most = max(total, key=lambda name: total[name])
    share = total[most] / sum(total.values()) if sum(total.values()) else 0.0
    return f"{most}, which bounds {share:.0%} of a step"


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
