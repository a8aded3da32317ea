"""``ScheduleKind``: what the registry knows of a schedule, and what all of them ask of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autopipe.errors import ScheduleError, unknown_choice
from autopipe.ir.schedule import Schedule, ScheduleSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """A number that a schedule takes beyond the layout. ``meaning``: one line for people."""

    name: str
    default: int
    minimum: int
    maximum: int
    meaning: str

    def with_default(self, default: int) -> Option:
        """Return the same option with another default."""
        return dataclasses.replace(self, default=default)


DEPTH = Option("depth", 1, 1, 64, "warm-up as a multiple of 1f1b's: more in flight hides transfers, and takes memory")


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleKind:
    """One schedule: a pure function and what is known of it.

    ``synchronous``: staleness 0, a flush after each minibatch. ``several_stages``: a rank may run more than one stage.
    ``replicas``: a stage may run on more than one rank. ``splits_backward``: uses I and W. ``example``: what the
    drawing in its docstring is made for.
    """

    name: str
    make: Callable[[ScheduleSpec], Schedule]
    description: str
    source: str
    synchronous: bool
    example: ScheduleSpec
    options: tuple[Option, ...] = ()
    several_stages: bool = False
    replicas: bool = True
    splits_backward: bool = False

    def defaults(self) -> dict[str, int]:
        """Return the options with their default values."""
        return {option.name: option.default for option in self.options}

    def complete(self, request: ScheduleSpec) -> ScheduleSpec:
        """Return the request with every option filled in. Raises: ScheduleError for an unknown one, or out of range."""
        known = {option.name: option for option in self.options}
        for name, value in request.options.items():
            option = known.get(name)
            if option is None:
                raise ScheduleError(
                    unknown_choice("option", name, known) if known else f"{self.name} takes no option {name!r}",
                    where=f"options of schedule {self.name}",
                    remedy=f"leave {name} out",
                )
            if not option.minimum <= value <= option.maximum:
                raise ScheduleError(
                    f"{self.name}: {name} is {value}; it runs from {option.minimum} to {option.maximum}",
                    remedy=f"{name}={option.default} is the default ({option.meaning})",
                )
        return dataclasses.replace(request, options={**self.defaults(), **request.options})


def line(num_stages: int, num_microbatches: int, num_minibatches: int = 1, **options: int) -> ScheduleSpec:
    """Return the request of a plain pipeline: stage s on rank s."""
    return ScheduleSpec(tuple((s,) for s in range(num_stages)), num_microbatches, num_minibatches, options=options)


def check_request(name: str, request: ScheduleSpec) -> None:
    """Refuse a request that no schedule could serve. Raises: ScheduleError with the numbers."""
    counts = {
        "microbatches": request.num_microbatches,
        "minibatches": request.num_minibatches,
        "stages": request.num_stages,
    }
    for what, count in counts.items():
        if count < 1:
            raise ScheduleError(f"{name} is asked for {count} {what}", remedy="ask for at least one")
    if request.first_minibatch < 0:
        raise ScheduleError(f"the first minibatch is {request.first_minibatch}", remedy="count minibatches from 0")
    used = sorted(rank for ranks in request.stage_ranks for rank in dict.fromkeys(ranks))
    if any(not ranks or len(set(ranks)) != len(ranks) for ranks in request.stage_ranks):
        raise ScheduleError(f"every stage needs ranks of its own; given {request.stage_ranks}")
    missing = [rank for rank in range(request.num_ranks) if rank not in used]
    if missing or min(used) < 0:
        raise ScheduleError(
            f"ranks {sorted(set(used))} run stages; rank {(missing or used)[0]} has nothing to do",
            remedy="number the ranks from 0 without gaps",
        )


def check_one_stage_a_rank(name: str, request: ScheduleSpec) -> None:
    """Refuse a layout in which a rank runs two stages. Raises: ScheduleError naming the rank."""
    check_request(name, request)
    stage_of: dict[int, int] = {}
    for stage, ranks in enumerate(request.stage_ranks):
        for rank in ranks:
            if rank in stage_of:
                raise ScheduleError(
                    f"{name} runs one stage on a rank; rank {rank} has stages {stage_of[rank]} and {stage}",
                    remedy="choose interleaved, or give each stage ranks of its own",
                )
            stage_of[rank] = stage
