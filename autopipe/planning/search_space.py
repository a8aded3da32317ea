"""``Space``: the schedules, stages per rank and replicas that a request allows, as options of the planner.

The planner itself tries numbers of microbatches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.errors import PlanError
from autopipe.ir.cuts import Cuts
from autopipe.ir.profile import Profile
from autopipe.ir.schedule import ScheduleSpec
from autopipe.planning import PlanOptions
from autopipe.planning.requests import PlanRequest, schedule_flag
from autopipe.schedules import REGISTRY, ScheduleKind, layout_of, make
from autopipe.schedules.kind import DEPTH

# the first schedule that ``auto`` tries: it wins ties, and needs less memory than gpipe
_AUTO_FIRST = "1f1b"
# above this number of ranks, numbers of replicas are powers of two, and plans within 1 % of the optimum
MANY_RANKS = 32
# the pairs of cuts that a search for the same replicas of every stage may evaluate under ``auto``: some seconds
MOST_PAIRS = 1e8


@dataclass(frozen=True, slots=True)
class Space:
    """The options to search for a request."""

    unreplicated: tuple[PlanOptions, ...]  # one rank per stage
    replicated: tuple[PlanOptions, ...]  # stages may have several ranks; only of schedules that support it
    left_out: tuple[str, ...] = ()  # the schedules that were not considered, and why
    fewer: tuple[PlanOptions, ...] = ()  # one rank per stage, on fewer ranks than offered

    @staticmethod
    def of(request: PlanRequest, num_ranks: int, batch_size: int, *, links_known: bool = False) -> Space:
        """Return the space of a request. ``links_known``: the links were measured or described, not assumed.

        Raises: PlanError for an option that no plan can meet; ScheduleError if the user's schedule file breaks a rule.
        """
        name = request.schedule or "auto"
        if name == "custom":
            return Space((_of_grid(request, num_ranks, batch_size),), ())
        unreplicated: list[PlanOptions] = []
        names = schedules_with_options(
            schedules(name, links_known=links_known or bool(request.stages_per_rank)), request
        )
        for schedule in names:
            counts = REGISTRY[schedule].planned_stages_per_rank if num_ranks > 1 else (1,)
            for alone in _ordered(request, schedule, num_ranks, batch_size):
                for count in (request.stages_per_rank,) if request.stages_per_rank else counts:
                    unreplicated.append(dataclasses.replace(alone, stages_per_rank=count))
        ordered = [
            dataclasses.replace(options, offered=num_ranks)
            for ranks in rank_counts(num_ranks)
            for schedule in names
            for options in _ordered(request, schedule, ranks, batch_size)
        ]
        replicated = [with_replicas(options) for options in ordered if takes_replicas(options)]
        # behind the others: their best plan rules out many of these
        replicated += [
            equal
            for options in ordered
            if options.schedule_kind.equal_replicas
            for equal in _with_equal_replicas(request, options)
        ]
        left_out = _left_out(links_known) if name == "auto" else ()
        fewer = () if request.stages_per_rank else (options for options in ordered if options.num_ranks < num_ranks)
        return Space(tuple(unreplicated), tuple(replicated), left_out, tuple(fewer))

    def choices(self, replicas: str) -> tuple[PlanOptions, ...]:
        """Return the options to search with ``--replicas auto`` or ``never``.

        Raises: PlanError if replicas are requested and no schedule of the request supports them.
        """
        if replicas == "never":
            return self.unreplicated
        if not any(options.schedule_kind.replicas and not options.stage_ranks for options in self.unreplicated):
            raise PlanError(
                f"schedule {self.unreplicated[0].schedule!r} does not support replicated stages",
                remedy="--replicas never, or another schedule",
            )
        return (*self.unreplicated, *self.replicated)

    def covered_by(self, choices: Sequence[PlanOptions]) -> bool:
        """Return whether the choices include all options with replicas."""
        return bool(self.replicated) and set(self.replicated) <= set(choices)

    def rivals(self) -> tuple[PlanOptions, ...]:
        """Return the options of the best replicated plan for comparison: those of 1f1b if the request has none."""
        return self.replicated or (with_replicas(with_1f1b(self.unreplicated[0])),)


def _ordered(request: PlanRequest, schedule: str, num_ranks: int, batch_size: int) -> list[PlanOptions]:
    """Return the options of a schedule for the request, for each depth of its warm-up: one stage per rank."""
    registered = REGISTRY[schedule]
    depths: tuple[int | None, ...] = (request.warmup_depth,)
    if request.warmup_depth is None and registered.planned_depths and num_ranks > 1:
        depths = registered.planned_depths
    choices = []
    for depth in depths:
        kind = registered if depth in (None, registered.depth) else registered.with_depth(depth)
        if request.vertical_sync:
            kind = kind.with_one_version(num_ranks)
        depth_option = {} if depth is None or depth == registered.depth else {DEPTH.name: depth}
        choices.append(
            PlanOptions(
                num_ranks=num_ranks,
                batch_size=batch_size,
                num_microbatches=request.num_microbatches,
                microbatch_size=request.microbatch_size,
                schedule=schedule,
                kind=None if kind is registered else kind,
                recompute=request.recompute or "auto",
                exact_ties=request.exact_ties or "auto",
                schedule_options=tuple({**depth_option, **request.schedule_options}.items()),
            )
        )
    return choices


def schedules_with_options(names: tuple[str, ...], request: PlanRequest) -> tuple[str, ...]:
    """Return those of the schedules that have the schedule options of the request.

    Raises: PlanError if none has them, with the schedules that do, or if a value is out of range.
    """
    given = dict(request.schedule_options)
    if request.stages_per_rank:
        given["stages_per_rank"] = request.stages_per_rank

    def lacks(name: str) -> list[str]:
        known = {option.name for option in REGISTRY[name].options}
        return [option for option in given if option not in known]

    accepting = tuple(name for name in names if not lacks(name))
    for option in (option for name in accepting for option in REGISTRY[name].options):
        value = given.get(option.name, option.default)
        if not option.minimum <= value <= option.maximum:
            raise PlanError(
                f"{schedule_flag(option.name)} {value} is out of range: it runs from {option.minimum} to "
                f"{option.maximum}",
                remedy=f"omit it for {option.default} ({option.meaning})",
            )
    if accepting:
        return accepting
    missing = lacks(names[0])[0]
    takers = [kind.name for kind in REGISTRY.values() if missing in {option.name for option in kind.options}]
    who = f"schedule {names[0]} takes no" if len(names) == 1 else "no schedule that --schedule auto tries takes"
    remedy = f"omit it, or choose a schedule that does: {', '.join(takers)}"
    raise PlanError(f"{who} {schedule_flag(missing)}", remedy=remedy)


def _of_grid(request: PlanRequest, num_ranks: int, batch_size: int) -> PlanOptions:
    """Return the options for the user's schedule file, which is validated. ``num_ranks``: the number of its rows."""
    if request.grid is None:
        raise PlanError("--schedule custom needs a schedule file", remedy="--schedule-file FILE")
    schedules_with_options(("custom",), request)
    stage_ranks, count = layout_of(request.grid)
    make("custom", ScheduleSpec(stage_ranks, count, text=request.grid))
    for stage, ranks in enumerate(stage_ranks):
        if len(ranks) > 1:
            raise PlanError(
                f"the schedule file runs stage {stage} on ranks {list(ranks)}: the planner supports one rank per stage",
                remedy="write each stage in one row",
            )
    if request.num_microbatches not in (None, count):
        raise PlanError(
            f"the schedule file has {count} microbatches, but --num-microbatches is {request.num_microbatches}",
            remedy="omit --num-microbatches",
        )
    return PlanOptions(
        num_ranks=num_ranks,
        batch_size=batch_size,
        num_microbatches=count,
        microbatch_size=request.microbatch_size,
        schedule="custom",
        recompute=request.recompute or "auto",
        exact_ties=request.exact_ties or "auto",
        schedule_text=request.grid,
        stage_ranks=tuple(ranks[0] for ranks in stage_ranks),
    )


def with_1f1b(options: PlanOptions) -> PlanOptions:
    """Return the options for 1f1b, without options of another schedule."""
    return dataclasses.replace(
        options,
        schedule=_AUTO_FIRST,
        kind=None,
        stages_per_rank=1,
        schedule_options=(),
        schedule_text="",
        stage_ranks=(),
    )


def with_replicas(options: PlanOptions) -> PlanOptions:
    """Return the options with replicas allowed, for every stage another number."""
    many = options.num_ranks > MANY_RANKS
    return dataclasses.replace(
        options,
        may_replicate=True,
        stages_per_rank=1,
        replica_choices="powers" if many else "any",
        tolerance=0.01 if many else 0.0,
    )


def _with_equal_replicas(request: PlanRequest, options: PlanOptions) -> list[PlanOptions]:
    """Return the options with the same replicas for every stage, for each number that divides the ranks.

    Two groups of ranks or more run several stages each. A single group runs the whole model, as it does under other
    schedules: it is tried if the request names this one, without a number of stages per rank.
    """
    ranks, many = options.num_ranks, options.num_ranks > MANY_RANKS
    if many and ranks < options.offered:
        return []
    auto = request.schedule in (None, "auto")
    per_rank = (request.stages_per_rank,) if request.stages_per_rank else options.schedule_kind.planned_stages_per_rank
    whole = () if auto or request.stages_per_rank else (1,)
    divisors = [d for d in range(2, ranks + 1) if ranks % d == 0 and not (many and d & (d - 1))]
    return [
        dataclasses.replace(options, replicas=d, stages_per_rank=count, most_pairs=MOST_PAIRS if auto else math.inf)
        for d in divisors
        for count in (per_rank if d < ranks else whole)
    ]


def rank_counts(num_ranks: int) -> list[int]:
    """Return the numbers of ranks for which replicated plans are searched: all, half of them, and so on, down to one.

    If devices or links differ, one search uses all of its ranks. Otherwise it may leave some unused, but decides that
    by the closed-form estimate.
    """
    return [num_ranks >> k for k in range(num_ranks.bit_length())]


def takes_replicas(options: PlanOptions) -> bool:
    """Return whether the planner may give every stage another number of replicas with this schedule."""
    kind = options.schedule_kind
    return kind.replicas and not kind.equal_replicas and not options.stage_ranks


def schedules(name: str, *, links_known: bool = False) -> tuple[str, ...]:
    """Return the schedules to try.

    ``auto``: those with ``tried_by_auto``. Schedules with several stages per rank are included only if the links are
    known: they send more messages, which cost little on a link that is assumed to be fast.
    """
    if name != "auto":
        return (name,)
    kinds = [kind for kind in REGISTRY.values() if kind.tried_by_auto]
    names = [kind.name for kind in kinds if links_known or not _sends_more(kind)]
    return tuple(sorted(names, key=lambda name: name != _AUTO_FIRST))


def most_stages(profile: Profile) -> int:
    """Return the largest number of stages into which the model can be cut."""
    return len(Cuts(profile.graph).legal) + 1


def _sends_more(kind: ScheduleKind) -> bool:
    return max(kind.planned_stages_per_rank) > 1


def _left_out(links_known: bool) -> tuple[str, ...]:
    """Return why ``auto`` did not consider some schedules."""
    notes = [
        f"{kind.name} was not considered: the profile has no times of the two halves of a backward, which it splits"
        for kind in REGISTRY.values()
        if kind.splits_backward
    ]
    notes += [
        f"{kind.name} was not considered: it sends more messages, and the links are assumed (autopipe doctor --links "
        "measures them, --link and --cluster describe them)"
        for kind in REGISTRY.values()
        if kind.tried_by_auto and _sends_more(kind) and not links_known
    ]
    return tuple(notes)
