"""Why a plan is as it is: what each cut costs, what limits the plan, how far it is from the bound, what came second."""

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
from autopipe.planning.search.problem import Problem
from autopipe.units import in_bytes, in_seconds

LEAST_GAIN = 1e-3


@dataclass(frozen=True, slots=True)
class CutReason:
    """The cut before ``node``. ``seconds``: the slower of its two stages; ``earlier``/``later``: with the cut moved.

    ``place``: where it lies in the words of the model (``ir.module_names``).
    """

    node: str
    crossing_bytes: int
    seconds: float
    earlier_seconds: float | None
    later_seconds: float | None
    place: str = ""

    def __str__(self) -> str:
        """Say it in one line."""
        text = (
            f"{self.place or f'before {self.node}'}: {in_bytes(self.crossing_bytes)} cross; the slower side takes "
            f"{in_seconds(self.seconds)}"
        )
        for name, value in (("earlier", self.earlier_seconds), ("later", self.later_seconds)):
            if value is not None:
                text += f", {in_seconds(value)} one cut {name}"
        return text


_MOST_PERCENT = 10  # a gap from here on is a multiple, and no percentage


@dataclass(frozen=True, slots=True)
class Explanation:
    """``bound_seconds``: no plan takes a step in less. ``runner_up``: the best plan with other cuts.

    ``left_out``: what was not considered, and why. ``other_places``: of the runner-up's cuts in the words of the
    model.
    """

    cuts: tuple[CutReason, ...]
    limit: str
    bound_seconds: float
    gap: float
    runner_up: Plan | None
    left_out: tuple[str, ...] = ()
    other_places: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return it as lines of text."""
        lines = [str(cut) for cut in self.cuts]
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
    """Explain a plan that ``make_plan`` made with these arguments."""
    fixed = dataclasses.replace(options, num_microbatches=plan.num_microbatches, microbatch_size=None)
    problem = Problem(profile, cluster, fixed, Cuts(profile.graph), plan.num_microbatches)
    bound = lower_bound(problem)
    others = runners_up(problem, plan, solve_problem)
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
    """Return seconds that no plan for these ranks can beat: compute alone, shared evenly, without bubble."""
    n, m = problem.tables.num_atoms, problem.num_microbatches
    work = float(problem.tables.forward_seconds[0, n] + problem.tables.backward_seconds[0, n])
    return m * work / math.fsum(problem.cluster.device(rank).speed for rank in range(problem.options.num_ranks))


def _compute(problem: Problem, plan: Plan, stage: int, start: int, stop: int) -> float:
    """Return the compute seconds of a stage if it ran from one node position to another, for each of its replicas."""
    edges, tables, ranks = problem.tables.edges, problem.tables, plan.stages[stage].ranks
    i, j = edges.index(start), edges.index(stop)
    forward = float(tables.forward_seconds[i, j]) * (2 if plan.stages[stage].recompute else 1)
    seconds = forward + float(tables.backward_seconds[i, j])
    return seconds / problem.cluster.speed_of(ranks) / len(ranks)


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
    # both by the formula: a simulator's figure is not comparable
    limited = solve_problem(problem)
    free = solve_problem(dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, devices=unlimited)))
    if free is not None and limited is not None:
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
