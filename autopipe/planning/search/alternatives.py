"""Alternatives to the best plan: runners-up and the data-parallel plan; and the choice among them by a score."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopipe.errors import PlanError
from autopipe.ir.plan import Plan, Prediction
from autopipe.planning.build import StageChoice, build_plan
from autopipe.planning.cost.memory import in_flight, weight_versions
from autopipe.planning.cost.tables import CutsWithout
from autopipe.planning.search.problem import Problem
from autopipe.units import in_short_bytes

Score = Callable[[Plan], Prediction]
MOST_SCORED = 20


@dataclass(frozen=True, slots=True)
class RankedScore:
    """An expensive score, evaluated only for the ``most`` best plans by the closed-form estimate.

    If these are fewer than about 20, there is no search for runners-up: each takes a search of its own. Neither is
    there one if ``searches_runners_up`` is False.
    """

    score: Score
    most: int  # plans
    least: Callable[[Plan], float] = lambda plan: 0.0  # a lower bound of the seconds of a step with this score
    searches_runners_up: bool = True

    def __call__(self, plan: Plan) -> Prediction:
        """Return the score of a plan."""
        return self.score(plan)


def runners_up(problem: Problem, plan: Plan, solve: Callable[[Problem], Plan | None]) -> list[Plan]:
    """Return, for each cut of the plan, the best plan without it; the best first, each plan once.

    Every plan with other cuts lacks one of the plan's cuts, so the first of them is the best plan with other cuts.
    """
    others: dict[str, Plan] = {}
    for stage in plan.stages[1:]:
        if not problem.options.may_replicate and len(problem.cuts.legal) < len(plan.stages):
            break  # without one of its cuts, the graph has too few
        other = solve(dataclasses.replace(problem, cuts=CutsWithout(problem.cuts, stage.start)))
        if other is not None:
            others.setdefault(other.digest, other)
    return sorted(others.values(), key=lambda other: other.predicted.step_seconds)


def most_scored(score: Score) -> int:
    """Return the number of plans for which a score is evaluated."""
    return score.most if isinstance(score, RankedScore) else MOST_SCORED


def best_by_score(
    pairs: Sequence[tuple[Problem, Plan]],
    score: Score,
    solve: Callable[[Problem], Plan | None],
    limit: float = math.inf,
) -> Plan | None:
    """Return the best plan by ``score`` among about 20 that are best by the closed-form estimate.

    ``limit``: seconds of a step. If bounds prove that none of the plans takes less, the result is None.

    These are the best plan of each problem, and runners-up. The whole model on each rank is always among them, because
    the estimate ignores part of the cost of messages.
    """
    most = most_scored(score)
    ranked = sorted(pairs, key=lambda pair: (pair[1].predicted.step_seconds, pair[1].num_microbatches))
    plans = [plan for _, plan in ranked[:most]]
    searches = most >= MOST_SCORED and not (isinstance(score, RankedScore) and not score.searches_runners_up)
    for problem, plan in ranked[:3] if searches else ():
        if len(plans) < most:
            plans.extend(runners_up(problem, plan, solve)[: most - len(plans)])
    whole = sorted(whole_model_plans([problem for problem, _ in pairs]), key=lambda plan: plan.predicted.step_seconds)
    different = {(plan.digest, plan.num_microbatches): plan for plan in (*plans, *whole[:most])}
    scored: list[Plan] = []
    fastest = math.inf
    for plan in different.values():
        if min(fastest, limit) < math.inf and isinstance(score, RankedScore):
            least = score.least(plan)
            if least > fastest or least >= limit:
                continue  # it cannot be the best
        scored.append(dataclasses.replace(plan, predicted=score(plan)))
        fastest = min(fastest, scored[-1].predicted.step_seconds)
    return min(scored, key=lambda plan: (plan.predicted.step_seconds, plan.num_microbatches), default=None)


def whole_model_plans(problems: Sequence[Problem]) -> Iterator[Plan]:
    """Yield the plan with one stage on all ranks for each problem that allows replicas, if it fits."""
    for problem in problems:
        if problem.options.may_replicate:
            try:
                yield data_parallel_plan(problem)
            except PlanError:
                continue


def data_parallel_plan(problem: Problem) -> Plan:
    """Return the plan with one stage on all ranks, but not on more ranks than microbatches.

    Raises: PlanError with the bytes if the model does not fit a device.
    """
    from autopipe.planning.search.replicated import arrays_of

    given, m, n = problem.options.num_ranks, problem.num_microbatches, problem.tables.num_atoms
    ranks = min(given, m)
    options = dataclasses.replace(
        problem.options,
        kind=dataclasses.replace(problem.kind, equal_replicas=False),  # there is only one stage
        replicas=1,
        num_ranks=ranks,
        offered=problem.options.offered or given,
        may_replicate=True,
        stages_per_rank=1,
    )
    replicated = dataclasses.replace(problem, options=options)
    tau, recompute = arrays_of(replicated).stage((0, n, ranks, 0))
    num_in_flight = in_flight(problem.kind, m, behind=0, num_ranks=ranks, replicas=ranks)
    versions = weight_versions(problem.kind, m, num_in_flight, ranks)
    if tau == math.inf:
        block = problem.block_tables if "block" in replicated.modes else None
        memory_of, sharing = problem.tables.memory, ranks if options.sharded else 1
        peaks = (
            memory_of.peak(num_in_flight, versions, mode, block=block, sharing=sharing) for mode in replicated.modes
        )
        least = min(float(peak[0, n]) for peak in peaks)
        memory = min(problem.cluster.device(rank).memory_bytes for rank in range(ranks))
        raise PlanError(
            f"the whole model needs {in_short_bytes(least)} on each rank, but {in_short_bytes(memory)} are available"
        )
    nodes = len(problem.profile.graph.nodes)
    choice = StageChoice(0, nodes, tuple(range(ranks)), recompute, num_in_flight, versions, tau * ranks)
    return build_plan(replicated, [choice])
