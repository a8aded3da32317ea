"""The simulator as the score of a search."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopipe.errors import PlanError, ScheduleError
from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan, Prediction
from autopipe.ir.profile import Profile
from autopipe.planning.api import candidate_counts
from autopipe.planning.cost.predict import MOST_SIMULATED_ONCE, least_step_seconds, predict
from autopipe.planning.cost.tables import cuts_of
from autopipe.planning.options import PlanOptions
from autopipe.planning.refusals import microbatch_count
from autopipe.planning.search.alternatives import MOST_SCORED, RankedScore, Score
from autopipe.planning.search.few_cuts import MOST_CUTS

# pairs of a rank and a microbatch that take about a quarter of a second to simulate
MOST_SIMULATED = 4096


def simulator_score(profile: Profile, cluster: Cluster, choices: Sequence[PlanOptions]) -> RankedScore:
    """Return the simulator as the score of a search. The larger the plans are, the fewer it simulates.

    If they are too large to simulate, the score is the closed-form estimate for all of them: the two kinds of
    prediction are never compared with each other. Runners-up are searched unless ``few_cuts_of_estimate``.
    """
    stages = len(cuts_of(profile).legal) + 1
    largest = max(1, *(_largest(profile, options, stages) for options in choices))
    if largest > MOST_SIMULATED_ONCE:
        return RankedScore(lambda plan: plan.predicted, 1)
    most = max(1, min(MOST_SCORED, MOST_SCORED * MOST_SIMULATED // largest))
    return RankedScore(
        simulated(profile, cluster),
        most,
        lambda plan: least_step_seconds(plan, profile, cluster),
        searches_runners_up=not few_cuts_of_estimate(profile, cluster),
    )


def few_cuts_of_estimate(profile: Profile, cluster: Cluster) -> bool:
    """Return whether times are estimated from datasheets, and the graph has more cuts than a search considers.

    Then a plan is not compared with those that lack one of its cuts: most cuts are left out in any case, times are
    estimates, and these searches would take longer than all others.
    """
    return bool(cluster.devices[0].datasheet) and len(cuts_of(profile).legal) > MOST_CUTS


def _largest(profile: Profile, options: PlanOptions, most_stages: int) -> int:
    try:
        fixed = microbatch_count(options)
        count = fixed or max(candidate_counts(profile, options), default=1)
        # if ranks may stay unused, no stage has more ranks than microbatches
        most = min(options.num_ranks, count * most_stages) if options.may_replicate else options.num_ranks
        return count * most
    except PlanError:
        return 0  # the search will raise it


def simulated(profile: Profile, cluster: Cluster) -> Score:
    """Return the simulator as a score. A plan that its schedule cannot run takes infinitely long.

    A plan that is too large to simulate keeps the closed-form estimate.
    """

    def score(plan: Plan) -> Prediction:
        if plan.num_ranks * plan.num_microbatches > MOST_SIMULATED_ONCE:
            return plan.predicted
        try:
            return predict(plan, profile, cluster)
        except ScheduleError:
            return Prediction(math.inf, 0.0, 0.0, plan.predicted.bottleneck_seconds)

    return score
