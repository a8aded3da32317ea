"""``explain``: the cost of each cut, the plan's bottleneck, its distance from the lower bound, and the runner-up."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from autopipe.ir.cluster import Cluster
from autopipe.ir.cuts import Cuts
from autopipe.ir.module_names import cut_place
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.planning.api import solve_problem
from autopipe.planning.options import PlanOptions
from autopipe.planning.search.alternatives import Score, most_scored, runners_up, whole_model_plans
from autopipe.planning.search.few_cuts import cuts_to_search
from autopipe.planning.search.problem import Problem
from autopipe.planning.spilled.explain import StageBound, bounds_of, limit_of
from autopipe.units import in_bytes, in_seconds

LEAST_GAIN = 1e-3


@dataclass(frozen=True, slots=True)
class CutReason:
    """One cut of a plan."""

    node: str  # the first node behind the cut
    crossing_bytes: int  # sent forward per microbatch
    seconds: float  # computation of the slower of its two stages, per microbatch
    earlier_seconds: float | None  # the same with the previous legal cut instead; None without one
    later_seconds: float | None  # the same with the next legal cut
    place: str = ""  # the modules around the cut (``ir.module_names``)

    def __str__(self) -> str:
        """Return one line of text."""
        text = (
            f"{self.place or f'before {self.node}'}: {in_bytes(self.crossing_bytes)} cross; the slower side takes "
            f"{in_seconds(self.seconds)}"
        )
        for name, value in (("earlier", self.earlier_seconds), ("later", self.later_seconds)):
            if value is not None:
                text += f", {in_seconds(value)} one cut {name}"
        return text


_MOST_PERCENT = 10  # a larger gap is shown as a multiple


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons for a plan."""

    cuts: tuple[CutReason, ...]
    limit: str  # the bottleneck, in words
    bound_seconds: float  # a lower bound of the time of a step, for any plan
    gap: float  # the relative distance of the plan's step from the bound
    runner_up: Plan | None  # the best plan with other cuts
    left_out: tuple[str, ...] = ()  # the schedules that were not considered, and why
    copies: tuple[StageBound, ...] = ()  # of stages that take turns on their device
    other_places: tuple[str, ...] = ()  # the modules around the cuts of the runner-up

    def lines(self) -> list[str]:
        """Return lines of text."""
        lines = [str(cut) for cut in self.cuts]
        lines += map(str, self.copies)
        lines.append(f"limited by {self.limit}")
        if self.gap < _MOST_PERCENT:
            lines.append(f"{self.gap:.1%} above the lower bound of {in_seconds(self.bound_seconds)} a step")
        else:
            lines.append(f"{self.gap + 1:.0f}x the ideal {in_seconds(self.bound_seconds)} a step")
        if self.runner_up is not None:
            step = in_seconds(self.runner_up.predicted.step_seconds)
            cuts = f"cut {'; '.join(self.other_places)}" if self.other_places else "one stage"
            lines.append(f"runner-up: {cuts}; {step} a step")
        return [*lines, *self.left_out]


def explain(
    plan: Plan, profile: Profile, cluster: Cluster, options: PlanOptions, *, score: Score | None = None
) -> Explanation:
    """Explain a plan that ``make_plan`` returned for these arguments."""
    fixed = dataclasses.replace(options, num_microbatches=plan.num_microbatches, microbatch_size=None)
    problem = Problem(profile, cluster, fixed, Cuts(profile.graph), plan.num_microbatches)
    bound = lower_bound(problem)
    if problem.kind.spills:
        gap = plan.predicted.step_seconds / bound - 1 if bound else 0.0
        bounds = bounds_of(plan, profile, cluster)
        return Explanation(_cut_reasons(problem, plan), limit_of(bounds), bound, gap, None, copies=bounds)
    searched = dataclasses.replace(problem, cuts=cuts_to_search(problem.cuts, profile, options.num_stages))
    others = runners_up(searched, plan, solve_problem)
    if len(plan.stages) > 1:
        others += whole_model_plans([problem])
    gap = plan.predicted.step_seconds / bound - 1 if bound else 0.0
    if score is not None:
        others = [dataclasses.replace(other, predicted=score(other)) for other in others[: most_scored(score)]]
    others.sort(key=lambda other: other.predicted.step_seconds)
    other = others[0] if others else None
    places = () if other is None else tuple(cut_place(profile.graph, stage.start) for stage in other.stages[1:])
    return Explanation(_cut_reasons(problem, plan), _limit(problem, plan), bound, gap, other, other_places=places)


def lower_bound(problem: Problem) -> float:
    """Return a lower bound of the seconds of a step: computation alone, divided evenly, without a bubble."""
    n, m = problem.tables.num_atoms, problem.num_microbatches
    work = float(problem.tables.forward_seconds[0, n] + problem.tables.backward_seconds[0, n])
    return m * work / math.fsum(problem.cluster.device(rank).speed for rank in range(problem.options.num_ranks))


def _compute(problem: Problem, plan: Plan, stage: int, start: int, stop: int) -> float:
    """Return the seconds of computation per microbatch of a stage, if it ran from ``start`` to ``stop``.

    Replicas divide them.
    """
    edges, tables, planned = problem.tables.edges, problem.tables, plan.stages[stage]
    i, j = edges.index(start), edges.index(stop)
    seconds = float(tables.forward_seconds[i, j] + tables.backward_seconds[i, j])
    if planned.recompute == "stage":
        seconds += float(tables.forward_seconds[i, j])
    elif planned.recompute == "block":
        seconds += float(problem.block_tables.again_seconds[i, j])
        if planned.units[-1][1] < planned.stop:  # its last unit is kept
            seconds -= float(problem.block_tables.last_seconds[i, j])
    return seconds / problem.cluster.speed_of(planned.ranks) / planned.replicas


def _cut_reasons(problem: Problem, plan: Plan) -> tuple[CutReason, ...]:
    edges = problem.tables.edges
    reasons = []
    for k in range(1, len(plan.stages)):
        before, behind = plan.stages[k - 1], plan.stages[k]
        place = edges.index(behind.start)

        def slower(cut: int, k: int = k, start: int = before.start, stop: int = behind.stop) -> float:
            return max(_compute(problem, plan, k - 1, start, cut), _compute(problem, plan, k, cut, stop))

        earlier, later = edges[place - 1], edges[place + 1]
        reasons.append(
            CutReason(
                behind.first,
                problem.cuts.crossing_bytes(behind.start, problem.microbatch_size),
                slower(behind.start),
                slower(earlier) if earlier > before.start else None,
                slower(later) if later < behind.stop else None,
                cut_place(problem.profile.graph, behind.start),
            )
        )
    return tuple(reasons)


def _limit(problem: Problem, plan: Plan) -> str:
    unlimited = tuple(dataclasses.replace(device, memory_bytes=0) for device in problem.cluster.devices)
    # both by the closed-form estimate, which is not comparable with the simulator's prediction
    limited = solve_problem(problem)
    roomy = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, devices=unlimited))
    free = solve_problem(roomy)
    if free is not None and limited is not None:  # pragma: no branch - a plan was found, so both searches find one
        gain = limited.predicted.step_seconds / free.predicted.step_seconds - 1
        if gain > LEAST_GAIN:
            return f"memory: without its limit a step would be {gain:.1%} faster"
    shares = [stage.seconds / stage.replicas for stage in plan.stages]
    slowest = shares.index(max(shares))
    same = limited is not None and limited.digest == plan.digest
    total = limited.predicted.bottleneck_seconds if same and limited is not None else plan.predicted.bottleneck_seconds
    if total and shares[slowest] < total * 0.5:
        return f"links: of the slowest stage's {in_seconds(total)}, {1 - shares[slowest] / total:.0%} are transfers"
    label = plan.stages[slowest].label
    return f"compute of {label}: {in_seconds(shares[slowest])} of a period of {in_seconds(total)}"
