"""The baselines of a plan and its explanation: the tables that ``autopipe plan`` prints besides the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.planning import Comparison, Explanation, comparison, explain
from autopipe.planning.cost.peaks import search_within_memory
from autopipe.planning.search_space import Space, takes_replicas, with_1f1b, with_replicas
from autopipe.planning.simulated_scores import simulator_score
from autopipe.planning.spilled.explain import comparison_of_spilled


def compare_plan(plan: Plan, profile: Profile, cluster: Cluster, space: Space, *, every: bool = False) -> Comparison:
    """Compare the plan with a single device, data parallelism, the best unreplicated pipeline and the best plan.

    ``every``: the plan is already the best of those with replicas.
    """
    if plan.stages[0].spilled:
        return comparison_of_spilled(plan, profile, cluster, space.unreplicated[0])
    rivals = space.rivals()
    score = simulator_score(profile, cluster, (*space.unreplicated, *rivals))
    first = space.unreplicated[0]
    base = with_1f1b(first) if first.stage_ranks else first  # a schedule file fixes the number of ranks

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


def explain_plan(plan: Plan, profile: Profile, cluster: Cluster, space: Space) -> Explanation:
    """Return the reason for each cut, the plan's bottleneck, its distance from the lower bound, and the runner-up."""
    per_rank = plan.schedule_options.get("stages_per_rank", 1)
    counts = {stage.replicas for stage in plan.stages}
    ours = [o for o in (*space.unreplicated, *space.replicated) if o.schedule == plan.schedule]
    if counts == {1}:
        ours = [o for o in space.fewer if (o.schedule, o.num_ranks) == (plan.schedule, plan.num_ranks)] + ours
    if counts != {1} and ours[0].schedule_kind.equal_replicas:
        (replicas,) = counts
        ours = [o for o in ours if (o.replicas, o.num_groups) == (replicas, plan.num_ranks // replicas)]
    options = next(o for o in ours if o.stages_per_rank == per_rank)
    if takes_replicas(options) and counts != {1}:
        options = with_replicas(options)
    reasons = explain(plan, profile, cluster, options, score=simulator_score(profile, cluster, [options]))
    return dataclasses.replace(reasons, left_out=space.left_out)
