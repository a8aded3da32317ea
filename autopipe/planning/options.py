"""What a plan is asked for. What a *schedule* needs is handed in as a value, never imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autopipe.errors import PlanError, unknown_choice

RECOMPUTE = ("auto", "always", "never")
EXACT_TIES = ("auto", "always")


@dataclass(frozen=True, slots=True)
class ScheduleNeeds:
    """What a schedule asks of a plan. ``s`` counts stages from 0, ``p`` stages, ``m`` microbatches, ``r`` replicas.

    ``flush``: the pipeline drains before each optimizer step; else steps overlap (asynchronous).
    ``in_flight``: forwards whose backward is not done, at most: ``"all"`` is m; ``"depth"`` is
    min(m, ceil(depth * ranks behind this stage / r) + 1), ``"ranks"`` min(m, ceil(all ranks / r)). An asynchronous
    schedule does not stop at m.
    ``weight_versions``: how many copies of the weights live at once, or a function of m that returns it; ``"depth"`` is
    1 + ceil((in flight - 1) r / m). An asynchronous schedule with v of them sends at most (v - 1) m microbatches ahead.
    ``min_microbatches``: the least m, or a function of p that returns it. ``replicas``: whether it takes replicas.
    ``splits``: the halves of the backward for the weights wait: stage s lets s of them.
    """

    name: str
    flush: bool = True
    in_flight: str = "depth"
    depth: int = 1
    weight_versions: int | str | Callable[[int], int] = 1
    min_microbatches: int | Callable[[int], int] = 1
    replicas: bool = True
    splits: bool = False

    def least_microbatches(self, num_stages: int) -> int:
        """Return the least number of microbatches that it runs with."""
        if callable(self.min_microbatches):
            return self.min_microbatches(num_stages)
        return self.min_microbatches

    def fixed_versions(self, num_microbatches: int) -> int | None:
        """Return the copies of the weights where every stage keeps the same number, else None."""
        if isinstance(self.weight_versions, str):
            return None
        return self.weight_versions if isinstance(self.weight_versions, int) else self.weight_versions(num_microbatches)

    def with_depth(self, depth: int) -> ScheduleNeeds:
        """Return the needs with a warm-up so many times as deep as 1f1b's."""
        least = self.min_microbatches
        deeper = (lambda p: depth * least(p)) if callable(least) else least
        return dataclasses.replace(self, depth=depth, min_microbatches=deeper)

    def with_one_version(self, num_ranks: int) -> ScheduleNeeds:
        """Return the needs where all stages are as stale as the first, which sends ``depth * (num_ranks - 1)`` ahead.

        So many without replicas; fewer with them.
        """
        return dataclasses.replace(self, weight_versions=lambda m: 1 + -(-self.depth * (num_ranks - 1) // m))


NEEDS: Mapping[str, ScheduleNeeds] = MappingProxyType(
    {
        needs.name: needs
        for needs in (
            ScheduleNeeds("gpipe", in_flight="all"),
            ScheduleNeeds("1f1b"),
            ScheduleNeeds("interleaved", replicas=False),
            ScheduleNeeds("eager-1f1b", depth=2),
            ScheduleNeeds("zero-bubble", in_flight="ranks", replicas=False, splits=True),
            ScheduleNeeds("custom", in_flight="all"),
            ScheduleNeeds("2bw", flush=False, weight_versions=2, min_microbatches=lambda p: p - 1),
            ScheduleNeeds("pipedream", flush=False, weight_versions="depth"),
        )
    }
)
"""What the schedules of the product need; a caller with a schedule of its own passes ``PlanOptions.needs``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What to plan for.

    ``batch_size``: samples of one optimizer step. ``num_microbatches`` or ``microbatch_size``: at most one of
    them; with neither, the planner tries powers of two. ``recompute``: "auto" (only where a stage does not fit
    without), "always", "never". ``straight``: one rank a stage, ``num_ranks`` stages.
    ``schedule_options``: what else the schedule is told, and ``schedule_text`` its text; the plan takes both over.
    ``stage_ranks``: the rank of each stage, where a schedule's text says it; else stages are dealt out in turn.
    ``exact_ties``: "always" adds up the gradients of tied parameters in plain autograd's order whatever their size,
    "auto" those of small ones.
    ``offered``: the ranks that there are, where ``num_ranks`` of them are to be used; 0: no others.
    ``replica_choices``: "any", or "powers" of two (a faster search). ``tolerance``: how far from the best a flush plan
    may stay, 0 for exact.

    Raises: PlanError for a value that no plan can satisfy.
    """

    num_ranks: int
    batch_size: int
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    schedule: str = "1f1b"
    needs: ScheduleNeeds | None = None
    recompute: str = "auto"
    stages_per_rank: int = 1
    straight: bool = True
    replica_choices: str = "any"
    tolerance: float = 0.0
    schedule_options: tuple[tuple[str, int], ...] = ()
    schedule_text: str = ""
    stage_ranks: tuple[int, ...] = ()
    offered: int = 0
    exact_ties: str = "auto"

    def __post_init__(self) -> None:
        for name in ("num_ranks", "batch_size", "stages_per_rank"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        for name in ("num_microbatches", "microbatch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} is {value}; at least 1 is needed")
        if self.recompute not in RECOMPUTE:
            raise PlanError(unknown_choice("recompute setting", self.recompute, RECOMPUTE))
        if self.exact_ties not in EXACT_TIES:
            raise PlanError(unknown_choice("setting of exact ties", self.exact_ties, EXACT_TIES))
        if self.stages_per_rank > 1 and not self.straight:
            raise PlanError(
                "several stages a rank and replicated stages do not go together",
                remedy="use stages_per_rank 1, or a straight pipeline",
            )
        if self.needs is None and self.schedule not in NEEDS:
            raise PlanError(unknown_choice("schedule", self.schedule, NEEDS))
        if self.needs is not None and self.needs.name != self.schedule:
            raise PlanError(f"the needs of schedule {self.needs.name!r} were given for schedule {self.schedule!r}")
        if not self.straight and not self.schedule_needs.replicas:
            raise PlanError(
                f"schedule {self.schedule!r} runs no replicated stages",
                remedy="plan a straight pipeline, or choose another schedule",
            )

    @property
    def schedule_needs(self) -> ScheduleNeeds:
        """What the schedule needs."""
        return self.needs if self.needs is not None else NEEDS[self.schedule]

    @property
    def num_stages(self) -> int:
        """How many stages a straight plan has."""
        return len(self.stage_ranks) or self.num_ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Return the rank that runs a stage of a straight plan."""
        return self.stage_ranks[stage] if self.stage_ranks else stage % self.num_ranks

    def stages_on(self, rank: int) -> int:
        """Return how many stages a rank of a straight plan runs."""
        return self.stage_ranks.count(rank) if self.stage_ranks else self.stages_per_rank
