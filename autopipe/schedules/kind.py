"""``ScheduleKind``: the single description of a schedule. The planner, the command line and the runtime read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from autopipe.errors import ScheduleError, unknown_choice
from autopipe.ir.schedule import Schedule, ScheduleSpec

InFlight = Literal["all", "depth", "ranks"]


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """An integer parameter of a schedule, in addition to the layout."""

    name: str
    default: int
    minimum: int
    maximum: int
    meaning: str  # one line of help

    def with_default(self, default: int) -> Option:
        """Return the same option with another default."""
        return dataclasses.replace(self, default=default)


DEPTH = Option("depth", 1, 1, 64, "warm-up as a multiple of 1f1b's: more in flight hides transfers but takes memory")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """A schedule: the pure function that builds it, and the properties that the planner needs to estimate its cost.

    Below, ``p`` is the number of stages, ``m`` that of microbatches and ``r`` that of a stage's replicas.
    """

    name: str
    make: Callable[[ScheduleSpec], Schedule]
    description: str  # one line of help
    source: str  # the paper, with its section
    synchronous: bool  # a flush after each minibatch: staleness 0. Otherwise steps overlap.
    example: ScheduleSpec = dataclasses.field(compare=False)  # the spec whose rows the module's docstring draws
    options: tuple[Option, ...] = ()
    several_stages: bool = False  # a rank may run more than one stage
    replicas: bool = True  # a stage may run on more than one rank
    equal_replicas: bool = False  # if it does, every stage runs on the same number of ranks
    splits_backward: bool = False  # uses I and W; stage s defers s weight halves
    spills: bool = False  # stages take turns on one device; uses L, O and U

    # The most microbatches in flight on a rank of a stage: "all" is m / r; "depth" is
    # min(m / r, depth * (ranks of later stages) / r + 1); "ranks" is min(m / r, (all ranks) / r); each rounded up.
    # Without a flush, m / r is not a limit.
    in_flight: InFlight = "depth"

    # The copies of the weights that exist at once, or a function of m that returns it. "in flight" is
    # 1 + ceil((in flight - 1) r / m).
    weight_versions: int | Literal["in flight"] | Callable[[int], int] = 1

    # The least m for (p, depth).
    min_microbatches: Callable[[int, int], int] = lambda num_stages, depth: 1

    # Raises ScheduleError if the schedule cannot run a request. ``make`` does so, too, but takes time for all rows.
    check: Callable[[ScheduleSpec], object] = lambda request: None

    # Whether ``--schedule auto`` considers it. It must give plain training's result.
    tried_by_auto: bool = False

    # The numbers of stages per rank that the planner tries if the user gives none. Under ``auto``, a schedule with
    # more than one is considered only if the links were measured or described, because it sends more messages.
    planned_stages_per_rank: tuple[int, ...] = (1,)

    # The values of the option ``depth`` that the planner tries if the user gives none. They must give the same result.
    # Empty: only the default.
    planned_depths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.tried_by_auto and not self.synchronous:
            raise ValueError(f"schedule {self.name!r} has stale gradients, so --schedule auto must not choose it")

    @property
    def depth(self) -> int:
        """The warm-up as a multiple of 1f1b's: the default of the option ``depth``, or 1 without that option."""
        return self.defaults().get(DEPTH.name, 1)

    def with_depth(self, depth: int) -> ScheduleKind:
        """Return the schedule with another default of its option ``depth``."""
        options = tuple(option.with_default(depth) if option.name == DEPTH.name else option for option in self.options)
        return dataclasses.replace(self, options=options)

    def with_one_version(self, num_ranks: int) -> ScheduleKind:
        """Return the schedule with every stage as stale as the first (``vertical_sync``).

        The first stage sends ``depth * (num_ranks - 1)`` microbatches ahead without replicas, and fewer with them.
        """
        ahead = self.depth * (num_ranks - 1)
        return dataclasses.replace(self, weight_versions=lambda m: 1 + -(-ahead // m))

    def least_microbatches(self, num_stages: int) -> int:
        """Return the minimum number of microbatches."""
        return self.min_microbatches(num_stages, self.depth)

    def fixed_versions(self, num_microbatches: int) -> int | None:
        """Return the number of weight versions if every stage keeps the same number, else None."""
        if self.weight_versions == "in flight":
            return None
        return self.weight_versions if isinstance(self.weight_versions, int) else self.weight_versions(num_microbatches)

    def defaults(self) -> dict[str, int]:
        """Return the options with their default values."""
        return {option.name: option.default for option in self.options}

    def complete(self, request: ScheduleSpec) -> ScheduleSpec:
        """Return the request with a value for every option.

        Raises: ScheduleError if an option is unknown or out of range.
        """
        known = {option.name: option for option in self.options}
        for name, value in request.options.items():
            option = known.get(name)
            if option is None:
                raise ScheduleError(
                    unknown_choice("option", name, known) if known else f"{self.name} takes no option {name!r}",
                    where=f"options of schedule {self.name}",
                    remedy=f"omit {name}",
                )
            if not option.minimum <= value <= option.maximum:
                raise ScheduleError(
                    f"{self.name}: {name} must be from {option.minimum} to {option.maximum}, and is {value}",
                    remedy=f"{name}={option.default} is the default ({option.meaning})",
                )
        return dataclasses.replace(request, options={**self.defaults(), **request.options})


def line(num_stages: int, num_microbatches: int, num_minibatches: int = 1, **options: int) -> ScheduleSpec:
    """Return the request of a plain pipeline: stage s on rank s."""
    return ScheduleSpec(tuple((s,) for s in range(num_stages)), num_microbatches, num_minibatches, options=options)


def check_request(name: str, request: ScheduleSpec) -> None:
    """Refuse a request that no schedule can fulfil. Raises: ScheduleError with the numbers."""
    counts = {
        "microbatches": request.num_microbatches,
        "minibatches": request.num_minibatches,
        "stages": request.num_stages,
    }
    for what, count in counts.items():
        if count < 1:
            raise ScheduleError(f"{name} needs at least one of the {what}, got {count}")
    if request.first_minibatch < 0:
        raise ScheduleError(
            f"the first minibatch must be at least 0, and is {request.first_minibatch}",
            remedy="count minibatches from 0",
        )
    used = sorted(rank for ranks in request.stage_ranks for rank in dict.fromkeys(ranks))
    if any(not ranks or len(set(ranks)) != len(ranks) for ranks in request.stage_ranks):
        raise ScheduleError(f"a stage needs at least one rank, and each of its ranks once; given {request.stage_ranks}")
    missing = [rank for rank in range(request.num_ranks) if rank not in used]
    if missing or min(used) < 0:
        wrong = f"rank {missing[0]} has no stage" if missing else f"rank {used[0]} is negative"
        raise ScheduleError(
            f"{wrong}; ranks with a stage: {sorted(set(used))}", remedy="number the ranks from 0 without gaps"
        )


def check_one_stage_a_rank(name: str, request: ScheduleSpec) -> None:
    """Refuse a layout in which a rank runs two stages. Raises: ScheduleError naming the rank."""
    check_request(name, request)
    stage_of: dict[int, int] = {}
    for stage, ranks in enumerate(request.stage_ranks):
        for rank in ranks:
            if rank in stage_of:
                raise ScheduleError(
                    f"{name} runs one stage per rank; rank {rank} has stages {stage_of[rank]} and {stage}",
                    remedy="choose interleaved, or give each stage different ranks",
                )
            stage_of[rank] = stage
