"""What a plan is measured against, and why it is as it is: the tables of ``plan`` beyond the plan itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.planning import Comparison, Explanation, comparison, explain
from autopipe.planning.cost.peaks import search_within_memory
from autopipe.planning.cost.predict import simulator_score
from autopipe.planning.space import Space, plain, takes_replicas, with_replicas


def compared(plan: Plan, profile: Profile, cluster: Cluster, space: Space, *, every: bool = False) -> Comparison:
    """Return a single device, data parallelism, the best straight pipeline and the best plan of all.

    ``every``: the plan that was made is already the best of those with replicas.
    """
    rivals = space.rivals()
    score = simulator_score(profile, cluster, (*space.unreplicated, *rivals))
    first = space.unreplicated[0]
    base = plain(first) if first.stage_ranks else first  # a grid is for its own ranks alone

    def fit(find: Callable[[Cluster], Plan]) -> Plan:
        return search_within_memory(profile, cluster, find)

    return comparison(
        profile,
        cluster,
        base,
        score=score,
        unreplicated=space.unreplicated,
        replicated=rivals,
        current=plan,
        every=every,
        fit=fit,
    )


def explained(plan: Plan, profile: Profile, cluster: Cluster, space: Space) -> Explanation:
    """Return, for each cut, why there; what limits the plan; how near the bound it is; and what came second."""
    per_rank = plan.schedule_options.get("stages_per_rank", 1)
    options = next(o for o in space.unreplicated if o.schedule == plan.schedule and o.stages_per_rank == per_rank)
    if takes_replicas(options) and any(stage.replicas > 1 for stage in plan.stages):
        options = with_replicas(options)
    reasons = explain(plan, profile, cluster, options, score=simulator_score(profile, cluster, [options]))
    return dataclasses.replace(reasons, left_out=space.left_out)
