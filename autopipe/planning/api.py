"""``make_plan``: tries the allowed numbers of microbatches, solves each exactly and keeps the best plan."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopipe.errors import PlanError, ScheduleError, counted
from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.planning.build import build_plan, unreplicated_choices
from autopipe.planning.cost.tables import cuts_of, work_seconds
from autopipe.planning.options import PlanOptions
from autopipe.planning.refusals import (
    check_microbatches,
    check_stage_count,
    check_units,
    does_not_fit,
    microbatch_count,
)
from autopipe.planning.search.alternatives import Score, best_by_score
from autopipe.planning.search.few_cuts import cuts_to_search
from autopipe.planning.search.problem import Problem, check_cluster
from autopipe.planning.search.unreplicated import best_cuts, unreplicated_cuts
from autopipe.planning.spilled.search import SpilledSearch

MOST_MICROBATCH_SIZES = 8


def make_plan(
    profile: Profile,
    cluster: Cluster,
    options: PlanOptions,
    *,
    score: Score | None = None,
    progress: SearchProgress | None = None,
) -> Plan:
    """Return the best plan for the options.

    ``score``: a prediction that is better than the closed-form estimate, such as the simulator's. It decides among
    about 20 plans that are best by the estimate. ``progress``: reports the search. If an interrupt (Ctrl-C) ends it,
    the best plan so far is returned and ``progress.stopped`` is set; without any plan, KeyboardInterrupt is raised.

    Raises: PlanError if no plan is valid or fits the memory, with the numbers and a change that would fit.
    """
    progress = progress or SearchProgress()
    plan = _search(profile, cluster, options, score, progress, math.inf)
    assert plan is not None  # no limit rules out all plans
    return plan


def _search(
    profile: Profile,
    cluster: Cluster,
    options: PlanOptions,
    score: Score | None,
    progress: SearchProgress,
    limit: float,
) -> Plan | None:
    """Return the best plan: see ``make_plan``. None if bounds prove that no plan takes less than ``limit`` seconds."""
    problems = make_problems(profile, cluster, options)
    progress.total = max(progress.total, progress.tried + len(problems))
    kind = options.schedule_kind
    pairs: list[tuple[Problem, Plan]] = []
    best: Plan | None = None
    try:
        for problem in problems:
            progress.next(f"{kind.name}, {problem.num_microbatches} microbatches")
            plan = solve_problem(problem)
            if plan is not None:
                pairs.append((problem, plan))
        if not pairs:
            raise _refusal(problems[-1])
        runnable = _runnable(pairs, options)
        best = _fastest(runnable)
        if score is None or kind.spills:  # the search for spilled stages has simulated its plans
            return best
        return best_by_score(runnable, score, solve_problem, limit)
    except KeyboardInterrupt:
        usable: list[tuple[Problem, Plan]] = []
        with contextlib.suppress(PlanError):
            usable = _runnable(pairs, options) if pairs else []
        if not usable:
            raise
        progress.stopped = True
        best = best or _fastest(usable)
        return best if score is None else dataclasses.replace(best, predicted=score(best))


def _refusal(problem: Problem) -> PlanError:
    if problem.kind.spills:
        return SpilledSearch(problem).refusal()
    return does_not_fit(problem)


def _runnable(pairs: list[tuple[Problem, Plan]], options: PlanOptions) -> list[tuple[Problem, Plan]]:
    """Return the plans that the schedule can run. Raises: PlanError if all are refused."""
    kind = options.schedule_kind
    enough = [(q, plan) for q, plan in pairs if kind.least_microbatches(len(plan.stages)) <= plan.num_microbatches]
    if not enough:
        plan = pairs[-1][1]
        check_microbatches(kind, len(plan.stages), plan.num_microbatches, options.batch_size)
    runnable: list[tuple[Problem, Plan]] = []
    refusal: ScheduleError | None = None
    for problem, plan in enough:
        try:
            kind.check(kind.complete(plan.request()))
        except ScheduleError as error:
            refusal = error
        else:
            runnable.append((problem, plan))
    if not runnable and refusal is not None:
        raise PlanError(refusal.what, where=refusal.where, remedy=refusal.remedy)
    return runnable


def _fastest(pairs: list[tuple[Problem, Plan]]) -> Plan:
    return min((plan for _, plan in pairs), key=lambda plan: (plan.predicted.step_seconds, plan.num_microbatches))


def make_best_plan(
    profile: Profile,
    cluster: Cluster,
    choices: Sequence[PlanOptions],
    *,
    score: Score | None = None,
    progress: SearchProgress | None = None,
    least_gain: float = 1e-9,
) -> Plan:
    """Return the fastest plan over several options, such as schedules or numbers of stages per rank.

    A plan of later options must be faster than the best one before by the fraction ``least_gain``. Options without a
    plan are skipped, and so are those whose bound (``least_step_seconds``) proves that they cannot change the choice:
    those with the least bound are searched first. An interrupt has the same effect as in ``make_plan``.

    Raises: PlanError of the first options if none of them has a plan.
    """
    progress = progress or SearchProgress()
    bounds = [least_step_seconds(profile, cluster, options) for options in choices]
    # Let the fastest plan take x seconds. Options before it may be left out if all of their plans take more than
    # ``slower * x``: they can change which plan is best for a while, but each later options move that plan by a factor
    # of at most ``1 + least_gain``, so it is still slower than the fastest plan by more than that, and is replaced.
    slower = (1 + least_gain) ** (len(choices) + 2)
    plans: dict[int, Plan] = {}
    errors: dict[int, PlanError] = {}
    least, at, before = math.inf, 0, progress.tried
    for done, index in enumerate(sorted(range(len(choices)), key=bounds.__getitem__)):
        each = (progress.tried - before) // done if done else 1
        progress.total = progress.tried + each * (len(choices) - done)
        if bounds[index] > least * (slower if index < at else 1):
            continue
        try:
            limit = least * slower if index < at else least
            plan = _search(profile, cluster, choices[index], score, progress, limit)
        except PlanError as error:
            errors[index] = error
            continue
        except KeyboardInterrupt:
            if not plans:
                raise
            progress.stopped = True
            break
        if plan is None:
            continue
        plans[index] = plan
        if plan.predicted.step_seconds < least:
            least, at = plan.predicted.step_seconds, index
        if progress.stopped:
            break
    if not plans:
        raise errors[min(errors)] if errors else PlanError("nothing to choose from: no options were given")
    best: Plan | None = None
    for _, plan in sorted(plans.items()):
        if best is None or plan.predicted.samples_per_second > best.predicted.samples_per_second * (1 + least_gain):
            best = plan
    assert best is not None  # there is a plan
    return best


def cannot_beat(best: Plan, profile: Profile, cluster: Cluster, options: PlanOptions) -> bool:
    """Return whether no plan of the options can be faster than a known one: see ``least_step_seconds``."""
    least = least_step_seconds(profile, cluster, options)
    return least > 0 and least >= best.predicted.step_seconds


def least_step_seconds(profile: Profile, cluster: Cluster, options: PlanOptions) -> float:
    """Return a lower bound of the step of every plan of the options; 0 if none is known.

    The ranks share the computation of m microbatches, so one of them takes m W / p or more. If each stage has one rank
    and sends every gradient at the end of a backward, stage s waits for one microbatch at the stages before it, and
    they for its last one::

        step >= max_s (m t_s + sum of t_u, u < s) >= W / (1 - (1 - 1/m)^p)     equal for t_s = (1 - 1/m) t_(s-1)

    With equal replicas, it is the computation and the bubble, with stages that are equally long.
    """
    kind = options.schedule_kind
    if kind.spills or not kind.synchronous:
        return 0.0  # the prediction of steps that overlap is a difference of two simulations
    try:
        fixed = microbatch_count(options)
        counts = candidate_counts(profile, options) if fixed is None else (fixed,)
    except PlanError:
        return 0.0  # the search will raise it
    p, v, least = options.num_groups, options.stages_per_rank, math.inf
    for count in counts:
        microbatches = count / p
        if options.replicas > 1:
            # a split backward fills a part of the bubble
            fill = 0.0 if kind.splits_backward else (p - 1) / (p * v)
            microbatches = math.ceil(count / options.replicas) / p + fill
        elif v == 1 and not options.may_replicate and not options.stage_ranks and not kind.splits_backward:
            microbatches = 1 / (1 - (1 - 1 / count) ** p)
        work = work_seconds(profile, math.ceil(options.batch_size / count))
        least = min(least, work * microbatches)
    # the sums are added in another order
    return least * (1 - 1e-9) / max(device.speed for device in cluster.devices)


def make_problems(profile: Profile, cluster: Cluster, options: PlanOptions) -> list[Problem]:
    """Return one problem for each number of microbatches to try.

    Raises: PlanError if the options cannot be met with any memory.
    """
    check_cluster(cluster, options.num_ranks)
    cuts = cuts_of(profile)
    if not options.may_replicate:
        check_stage_count(options.num_stages, len(cuts.legal), profile.graph.name)
    cuts = cuts_to_search(cuts, profile, options.num_stages)
    fixed = microbatch_count(options)
    if fixed is not None and fixed < options.replicas:
        raise PlanError(
            f"{counted(fixed, 'microbatch')} cannot be shared by {options.replicas} replicas of every stage",
            remedy=f"use {options.replicas} microbatches or more, or fewer replicas",
        )
    least_stages = 1 if options.may_replicate else options.num_stages
    check_microbatches(options.schedule_kind, least_stages, fixed, options.batch_size)
    counts = candidate_counts(profile, options) if fixed is None else (fixed,)
    pairs = options.num_stages * (len(cuts.legal) + 1) ** 2 * len(counts)
    if pairs > options.most_pairs:
        raise PlanError(
            f"a search for {options.num_stages} stages evaluates {pairs:.3g} pairs of cuts, more than "
            f"{options.most_pairs:.3g}",
            remedy="request one schedule (--schedule): its search has no such limit",
        )
    problems = [Problem(profile, cluster, options, cuts, m) for m in counts]
    check_units(problems[0])
    return problems


def candidate_counts(profile: Profile, options: PlanOptions) -> tuple[int, ...]:
    """Return the numbers of microbatches to try, ascending: powers of two, and those that give the measured sizes.

    A number is skipped if its microbatches are outside the range of the measured sizes, unless that skips all.
    """
    needed = options.schedule_kind.least_microbatches(1 if options.may_replicate else options.num_stages)
    least = max(1, needed, options.replicas)
    batch = options.batch_size
    measured = [measurement.microbatch_size for measurement in profile.measurements]
    counts = {least, batch}
    counts.update(least * 2**k for k in range(20))
    counts.update(math.ceil(batch / size) for size in measured)
    possible = sorted(count for count in counts if least <= count <= batch)
    # the smallest microbatch counts: batch norm may refuse a size, which is then not measured
    inside = [n for n in possible if min(measured) <= batch // n and math.ceil(batch / n) <= max(measured)]
    chosen = inside or possible
    if len(chosen) > MOST_MICROBATCH_SIZES:
        steps = range(MOST_MICROBATCH_SIZES)
        chosen = [chosen[round(k * (len(chosen) - 1) / (MOST_MICROBATCH_SIZES - 1))] for k in steps]
    return tuple(chosen)


def solve_problem(problem: Problem) -> Plan | None:
    """Return the best plan for one number of microbatches, or None if no plan fits the memory."""
    if problem.options.may_replicate:
        from autopipe.planning.search.replicated import solve

        choices = solve(problem)
        return None if choices is None else build_plan(problem, choices)
    options = problem.options
    if problem.kind.spills:
        return SpilledSearch(problem).best()
    if options.replicas > 1 and not problem.apart and problem.cluster.levels_in_use(options.num_ranks) > 1:
        # replicas, or the stages of a pipeline, on neighbouring ranks: either may have the faster links
        plans = [_solve_equal(each) for each in (problem, dataclasses.replace(problem, apart=True))]
        return min(filter(None, plans), key=lambda plan: plan.predicted.step_seconds, default=None)
    return _solve_equal(problem)


def _solve_equal(problem: Problem) -> Plan | None:
    """Return the best plan whose stages do not differ in their replicas, or None if no plan fits the memory."""
    stages = problem.options.num_stages
    known, key = problem.sized.searched, problem.searched_as
    if key not in known:
        known[key] = best_cuts(problem, stages)
    best, starts = known[key]
    if math.isinf(best) and stages > problem.options.num_groups:
        divided = _divided_by_need(problem)
        return None if divided is None else _solve_equal(divided)
    return None if math.isinf(best) else build_plan(problem, unreplicated_choices(problem, starts))


def _divided_by_need(problem: Problem) -> Problem | None:
    """Return the problem with other limits for stages that share a device, with which a plan fits; None if none does.

    Stages may be far from equal: the first one may have an embedding. The plan that exceeds the estimated limits least
    says what its stages need.
    """
    stages, n = problem.options.num_stages, problem.tables.num_atoms
    known, key = problem.sized.searched, ("overflow", *problem.searched_as)
    if key not in known:
        known[key] = unreplicated_cuts(n, stages, lambda k: problem.overflow_table(k, stages))
    _, starts = known[key]
    if problem.needs or len(starts) != stages - 1:
        return None
    pairs = list(itertools.pairwise((0, *starts, n)))
    needs = tuple(float(problem.overflow_table(k, stages)[pair]) + problem.limit(k) for k, pair in enumerate(pairs))
    divided = dataclasses.replace(problem, needs=needs)
    return divided if all(need <= divided.limit(k) for k, need in enumerate(needs)) else None


def _ignore(what: str, fraction: float) -> None:
    """Discard progress."""


@dataclass(slots=True)
class SearchProgress:
    """The progress of one search."""

    report: Callable[[str, float], None] = _ignore  # called with (description of the problem, fraction done)
    stopped: bool = False  # an interrupt ended the search early, with the best plan so far
    tried: int = 0  # problems solved
    total: int = 0  # problems to solve, estimated

    def next(self, what: str) -> None:
        """Report the next problem."""
        self.report(what, self.tried / self.total if self.total else 0.0)
        self.tried += 1
