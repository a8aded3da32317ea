"""Why a plan that spills takes as long as it does: for each stage, whether computation or copies bound it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.planning.cost.predict import costs_of
from autopipe.schedules.costs import Costs
from autopipe.schedules.spilling.spilled import MESSAGES
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
