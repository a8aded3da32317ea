"""What a plan is measured against, and why it is as it is: the tables of ``plan`` beyond the plan itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.planning import Comparison, Explanation, comparison, explain
from autopipe.planning.alternatives import Score
from autopipe.planning.compare import verdict
from autopipe.workflow.peaks import fitting
from autopipe.workflow.predict import judge, scored
from autopipe.workflow.space import Space, plain, replicated, takes_replicas
from autopipe.workflow.store import PlanRecord


def compared(made: Plan, found: Profile, record: PlanRecord, space: Space) -> Comparison:
    """Return a single device, data parallelism, the best straight pipeline and the best plan of all."""
    cluster, rivals = record.cluster, space.rivals()
    score = judge(found, cluster, (*space.straight, *rivals))
    first = space.straight[0]
    base = plain(first) if first.stage_ranks else first  # a grid is for its own ranks alone

    def fit(find: Callable[[Cluster], Plan]) -> Plan:
        return fitting(found, cluster, find)

    result = comparison(found, cluster, base, score=score, straight=space.straight, free=rivals, made=made, fit=fit)
    return result if score is not None else _judged(result, scored(found, cluster))


def _judged(result: Comparison, score: Score) -> Comparison:
    """Return the plans that the formula chose, with the simulator's figures; the best of them is the best plan."""
    plans = {c.name: dataclasses.replace(c.plan, predicted=score(c.plan)) for c in result.contenders if c.plan}
    best = max(plans.values(), key=lambda plan: plan.predicted.samples_per_second, default=None)
    *others, last = (dataclasses.replace(c, plan=plans.get(c.name)) for c in result.contenders)
    contenders = (*others, dataclasses.replace(last, plan=best) if last.plan is not None else last)
    return Comparison(contenders, verdict(contenders))


def explained(made: Plan, found: Profile, record: PlanRecord, space: Space) -> Explanation:
    """Return, for each cut, why there; what limits the plan; how near the bound it is; and what came second."""
    per_rank = made.schedule_options.get("stages_per_rank", 1)
    options = next(o for o in space.straight if o.schedule == made.schedule and o.stages_per_rank == per_rank)
    if takes_replicas(options) and any(stage.replicas > 1 for stage in made.stages):
        options = replicated(options)
    reasons = explain(made, found, record.cluster, options, score=judge(found, record.cluster, [options]))
    return dataclasses.replace(reasons, left_out=space.left_out)
