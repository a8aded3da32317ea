"""What a plan is measured against, and why it is as it is: the tables of ``plan`` beyond the plan itself."""

from __future__ import annotations

from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.planning import Comparison, Explanation, comparison, explain
from autopipe.workflow.predict import scored
from autopipe.workflow.space import Space, replicated, takes_replicas
from autopipe.workflow.store import PlanRecord


def compared(made: Plan, found: Profile, record: PlanRecord, space: Space) -> Comparison:
    """Return a single device, data parallelism, the best straight pipeline and the best plan of all."""
    return comparison(
        found,
        record.cluster,
        space.straight[0],
        score=scored(found, record.cluster),
        straight=space.straight,
        free=space.rivals(),
        made=made,
    )


def explained(made: Plan, found: Profile, record: PlanRecord, space: Space) -> Explanation:
    """Return, for each cut, why there; what limits the plan; how near the bound it is; and what came second."""
    per_rank = made.schedule_options.get("stages_per_rank", 1)
    options = next(o for o in space.straight if o.schedule == made.schedule and o.stages_per_rank == per_rank)
    if takes_replicas(options) and any(stage.replicas > 1 for stage in made.stages):
        options = replicated(options)
    return explain(made, found, record.cluster, options, score=scored(found, record.cluster))
