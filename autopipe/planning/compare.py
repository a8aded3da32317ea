"""Compares four plans: one device, data parallelism, the best unreplicated pipeline, and the best plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopipe.errors import PlanError
from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.planning.api import make_best_plan, make_plan, make_problems
from autopipe.planning.options import PlanOptions
from autopipe.planning.search.alternatives import Score, data_parallel_plan

SINGLE = "single device"
PARALLEL = "data parallel"
STRAIGHT = "best straight pipeline"
THIS = "this plan"
Fit = Callable[[Callable[[Cluster], Plan]], Plan]


@dataclass(frozen=True, slots=True)
class Contender:
    """A row of the table."""

    name: str
    plan: Plan | None  # None if there is no such plan
    reason: str = ""  # why there is no such plan


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several plans for the same batch and memory."""

    contenders: tuple[Contender, ...]
    verdict: str  # whether a pipeline is faster, and than what; a sentence
    current: Plan | None = None  # the plan of the command, if it has one

    def title(self, contender: Contender) -> str:
        """Return the name of a contender, with a mark if it is the plan of the command."""
        is_current = contender.plan is not None and self.current is not None and _same(contender.plan, self.current)
        team = 1 if contender.plan is None else contender.plan.team
        name = f"one team of {team}" if contender.name == SINGLE and team > 1 else contender.name
        return f"{name} ({THIS})" if is_current and name != THIS else name

    @property
    def alone(self) -> Plan | None:
        """The plan on a single device; None if the model does not fit one."""
        return next((c.plan for c in self.contenders if c.name == SINGLE), None)


def comparison(
    profile: Profile,
    cluster: Cluster,
    options: PlanOptions,
    *,
    score: Score | None = None,
    unreplicated: Sequence[PlanOptions] = (),
    replicated: Sequence[PlanOptions] = (),
    current: Plan | None = None,
    every: bool = False,
    fit: Fit | None = None,
) -> Comparison:
    """Plan four ways for the same batch and memory. Only the best plan may replicate stages.

    ``unreplicated``, ``replicated``: the options among which the best pipeline and the best plan are chosen; those of
    ``options`` if empty. ``current``: a plan that exists already. It competes, and is a fifth row if it differs from
    all four. ``every``: it is the best of ``replicated``. ``fit``: runs a search until its plan fits the memory.
    """
    fit = fit or (lambda find: find(cluster))
    kind = options.schedule_kind
    line = dataclasses.replace(options, may_replicate=False, replicas=1, stages_per_rank=1)
    single = dataclasses.replace(line, num_ranks=1)
    parallel = dataclasses.replace(line, may_replicate=kind.replicas and not kind.equal_replicas)
    unreplicated, replicated = unreplicated or (line,), replicated or (parallel,)
    first = replicated[0] if replicated[0].may_replicate and not kind.replicas else parallel
    replicates = current is not None and any(stage.replicas > 1 for stage in current.stages)
    one_stage = current is not None and len(current.stages) == 1 < options.num_ranks
    pipeline = None if replicates or one_stage else current

    def any_of(choices: Sequence[PlanOptions]) -> Callable[[Cluster], Plan]:
        return lambda room: make_best_plan(profile, room, choices, score=score)

    others = (
        _contender(SINGLE, lambda: fit(lambda room: make_plan(profile, room, single, score=score))),
        _contender(PARALLEL, lambda: fit(lambda room: _data_parallel(profile, room, first, score))),
        _contender(STRAIGHT, lambda: pipeline or fit(any_of(unreplicated))),
    )
    # of equally fast plans, the plan of the command wins, then the pipeline
    known = [plan for plan in (current, *(row.plan for row in reversed(others))) if plan is not None]
    contenders = (
        *others,
        _contender("best plan", lambda: _best(None if every else lambda: fit(any_of(replicated)), known)),
    )
    text = verdict(contenders) + (
        _advice(contenders, current) or _to_a_pipeline(contenders, current, options.num_ranks)
    )
    known_already = current is None or any(row.plan is not None and _same(row.plan, current) for row in contenders)
    return Comparison(contenders if known_already else (*contenders, Contender(THIS, current)), text, current)


def _same(one: Plan, other: Plan) -> bool:
    return (one.digest, one.num_microbatches) == (other.digest, other.num_microbatches)


def _advice(contenders: tuple[Contender, ...], current: Plan | None) -> str:
    """Return, if the plan of the command is not the best one, a sentence with the options that choose the best."""
    best = contenders[-1].plan
    if current is None or best is None or best.predicted.samples_per_second <= current.predicted.samples_per_second:
        return ""
    options = []
    if any(stage.replicas > 1 for stage in best.stages) and all(stage.replicas == 1 for stage in current.stages):
        options.append("--replicas auto")
    if best.schedule != current.schedule:
        options.append(f"--schedule {best.schedule}")
    chosen = f"; {' '.join(options)} chooses the best one" if options else ""
    return (
        f" The plan of this command is not the best one: {current.predicted.samples_per_second:.4g} samples/s{chosen}."
    )


def _to_a_pipeline(contenders: tuple[Contender, ...], current: Plan | None, num_ranks: int) -> str:
    """Return, if the plan of the command has one stage, a sentence with the option that gives a pipeline."""
    possible = any(row.name == STRAIGHT and row.plan is not None for row in contenders)
    one_stage = current is not None and len(current.stages) == 1
    return " For a pipeline: --replicas never." if one_stage and possible and num_ranks > 1 else ""


def _best(find: Callable[[], Plan] | None, known: Sequence[Plan]) -> Plan:
    """Return the best of the known plans and the one that ``find`` returns; the earlier of equally good ones."""
    try:
        plans = [*known, *([find()] if find else [])]
    except PlanError:
        plans = list(known)
        if not plans:
            raise
    return max(plans, key=lambda plan: plan.predicted.samples_per_second)


def _contender(name: str, make: Callable[[], Plan]) -> Contender:
    try:
        return Contender(name, make())
    except PlanError as error:
        return Contender(name, None, error.what)


def _data_parallel(profile: Profile, cluster: Cluster, options: PlanOptions, score: Score | None) -> Plan:
    if not options.schedule_kind.replicas and options.num_ranks > 1:
        raise PlanError(f"schedule {options.schedule!r} does not support replicated stages")
    plans, refusals = [], []
    for problem in make_problems(profile, cluster, options):
        try:
            plan = data_parallel_plan(problem)
        except PlanError as error:
            refusals.append(error)
        else:
            plans.append(plan if score is None else dataclasses.replace(plan, predicted=score(plan)))
    if not plans:
        raise refusals[-1]
    return min(plans, key=lambda plan: (plan.predicted.step_seconds, plan.num_microbatches))


def verdict(contenders: tuple[Contender, ...]) -> str:
    """Return a sentence: whether a pipeline is faster than one device or data parallelism, and by how much."""
    rates = {c.name: c.plan.predicted.samples_per_second for c in contenders if c.plan is not None}
    if not rates:
        return "Nothing fits: " + contenders[-1].reason
    stages = {c.name: len(c.plan.stages) for c in contenders if c.plan is not None}
    best = max(rates, key=lambda name: (rates[name], -stages[name]))
    others = {name: rate for name, rate in rates.items() if stages[name] == 1 and name != best}
    if stages[best] == 1:
        pipelines = [rate for name, rate in rates.items() if stages[name] > 1]
        loss = f" The best pipeline reaches {max(pipelines) / rates[best]:.0%} of it." if pipelines else ""
        return f"A pipeline does not pay here: {best} is the fastest, {rates[best]:.4g} samples/s.{loss}"
    if not others:
        return f"Only a pipeline fits: {best}, {rates[best]:.4g} samples/s."
    rival = max(others, key=lambda name: others[name])
    return f"{best.capitalize()} is {rates[best] / others[rival]:.2f} times as fast as {rival}, the best single stage."
