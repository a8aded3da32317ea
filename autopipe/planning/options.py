"""``PlanOptions``: the constraints of one search."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopipe.errors import PlanError, unknown_choice
from autopipe.options.table import OPTIONS
from autopipe.schedules.kind import ScheduleKind
from autopipe.schedules.registry import REGISTRY


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The constraints of a search.

    Raises: PlanError for a value that no plan can satisfy.
    """

    num_ranks: int
    batch_size: int  # samples per optimizer step
    num_microbatches: int | None = None  # with neither this nor the size, the planner tries powers of two
    microbatch_size: int | None = None  # samples; excludes ``num_microbatches``
    schedule: str = "1f1b"
    kind: ScheduleKind | None = None  # a modified description of the schedule; None: the registered one
    # "never", "block" or "stage" for all stages; "auto": for each stage, the fastest that fits, where the user's own
    # calls of checkpoint() remain recomputed; "always": "block", or "stage" if that does not fit
    recompute: str = "auto"
    stages_per_rank: int = 1
    may_replicate: bool = False  # stages may have several ranks, each stage another number; otherwise ``replicas``
    replicas: int = 1  # ranks of every stage; ``num_ranks`` is a multiple of it
    replica_choices: str = "any"  # numbers of replicas to try: "any", or "powers" of two (a faster search)
    tolerance: float = 0.0  # relative distance from the optimum that a plan with a flush may have
    schedule_options: tuple[tuple[str, int], ...] = ()  # passed to the schedule, and stored in the plan
    schedule_text: str = ""  # the text of a ``custom`` schedule, stored in the plan
    stage_ranks: tuple[int, ...] = ()  # the rank of each stage, if the schedule's text says it; empty: round robin
    offered: int = 0  # the number of ranks available, if only ``num_ranks`` of them are to be used; 0: num_ranks
    most_pairs: float = math.inf  # pairs of cuts; a search that would evaluate more of them is refused
    sharded: bool = False  # replicas divide the optimizer state of their stage by whole parameters
    exact_ties: str = "auto"  # tied gradients in plain autograd's order: "always", or "auto" for small parameters

    def __post_init__(self) -> None:
        for name in ("num_ranks", "batch_size", "stages_per_rank", "replicas"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("num_microbatches", "microbatch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} is {value}; it must be at least 1")
        for name in ("recompute", "exact_ties"):
            if getattr(self, name) not in OPTIONS[name].choices:
                raise PlanError(unknown_choice(name, getattr(self, name), OPTIONS[name].choices))
        if self.stages_per_rank > 1 and self.may_replicate:
            raise PlanError(
                "several stages per rank and different numbers of replicas exclude each other",
                remedy="use stages_per_rank 1, or the same number of replicas for every stage (replicas)",
            )
        if self.num_ranks % self.replicas:
            raise PlanError(
                f"{self.replicas} replicas of every stage cannot have equal shares of {self.num_ranks} ranks",
                remedy=f"use a multiple of {self.replicas} ranks",
            )
        other = "may_replicate" if self.may_replicate else "stage_ranks" if self.stage_ranks else ""
        if self.replicas > 1 and other:
            raise PlanError(
                f"replicas is {self.replicas}, which excludes {other}",
                remedy=f"use replicas without {other}, or {other} with replicas 1",
            )
        if self.kind is None and self.schedule not in REGISTRY:
            raise PlanError(unknown_choice("schedule", self.schedule, REGISTRY))
        if self.kind is not None and self.kind.name != self.schedule:
            raise PlanError(f"kind describes schedule {self.kind.name!r}, but schedule is {self.schedule!r}")
        if (self.may_replicate or self.replicas > 1) and not self.schedule_kind.replicas:
            raise PlanError(
                f"schedule {self.schedule!r} does not support replicated stages",
                remedy="do not replicate stages, or choose another schedule",
            )
        if self.may_replicate and self.schedule_kind.equal_replicas:
            raise PlanError(
                f"schedule {self.schedule!r} needs the same number of replicas at every stage",
                remedy="give that number (replicas), or choose another schedule",
            )

    @property
    def schedule_kind(self) -> ScheduleKind:
        """The description of the schedule."""
        return self.kind if self.kind is not None else REGISTRY[self.schedule]

    @property
    def num_stages(self) -> int:
        """The number of stages of a plan whose stages do not differ in their replicas."""
        return len(self.stage_ranks) or self.num_groups * self.stages_per_rank

    @property
    def num_groups(self) -> int:
        """The number of groups of ``replicas`` ranks, each of which runs the same stages."""
        return self.num_ranks // self.replicas

    def group_of(self, stage: int) -> int:
        """Return the group that runs a stage; without replicas, its rank."""
        return self.stage_ranks[stage] if self.stage_ranks else stage % self.num_groups

    def stages_on(self, group: int) -> int:
        """Return the number of stages that each rank of a group runs."""
        return self.stage_ranks.count(group) if self.stage_ranks else self.stages_per_rank
