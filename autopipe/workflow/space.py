"""The plans that a request allows: schedules, stages a rank, replicas; as options of the planner.

The number and size of microbatches are the planner's own outer loop.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autopipe.errors import PlanError
from autopipe.ir.cuts import Cuts
from autopipe.ir.profile import Profile
from autopipe.planning import NEEDS, PlanOptions
from autopipe.schedules import REGISTRY
from autopipe.workflow.requests import PlanRequest

# where a schedule is to be chosen: the first one wins a tie, and needs less memory than gpipe
_AUTO_FIRST = "1f1b"
# a schedule of several stages a rank is tried with so many; one that merely can have them runs one
_STAGES_PER_RANK = {"interleaved": (2, 3, 4)}
# above so many ranks replicas are powers of two, and within 1 % of the best
MANY_RANKS = 32


@dataclass(frozen=True, slots=True)
class Space:
    """``straight``: one rank a stage. ``free``: replicas where they pay; a schedule without them is not in it."""

    straight: tuple[PlanOptions, ...]
    free: tuple[PlanOptions, ...]

    @staticmethod
    def of(request: PlanRequest, num_ranks: int, batch_size: int) -> Space:
        """Return the space of a request. Raises: PlanError for an option that no plan can meet."""
        straight: list[PlanOptions] = []
        for name in schedules(request.schedule or "auto"):
            alone = PlanOptions(
                num_ranks=num_ranks,
                batch_size=batch_size,
                num_microbatches=request.num_microbatches,
                microbatch_size=request.microbatch_size,
                schedule=name,
                recompute=request.recompute or "auto",
            )
            for count in _STAGES_PER_RANK.get(name, (1,)) if num_ranks > 1 else (1,):
                straight.append(dataclasses.replace(alone, stages_per_rank=count))
        free = [replicated(options) for options in straight if takes_replicas(options)]
        return Space(tuple(straight), tuple(free))

    def choices(self, replicas: str) -> tuple[PlanOptions, ...]:
        """Return what is searched with ``--replicas auto`` or ``never``.

        Raises: PlanError where no schedule of the request runs replicas, and they were asked for.
        """
        if replicas == "never":
            return self.straight
        if not self.free:
            raise PlanError(
                f"schedule {self.straight[0].schedule!r} runs no replicated stages",
                remedy="--replicas never, or another schedule",
            )
        return (*self.straight, *self.free)

    def rivals(self) -> tuple[PlanOptions, ...]:
        """Return the options of the best replicated plan to compare with: 1f1b's where the request's has none."""
        if self.free:
            return self.free
        other = dataclasses.replace(self.straight[0], schedule=_AUTO_FIRST, stages_per_rank=1)
        return (replicated(other),)


def replicated(options: PlanOptions) -> PlanOptions:
    """Return the options with replicas allowed."""
    many = options.num_ranks > MANY_RANKS
    return dataclasses.replace(
        options,
        straight=False,
        stages_per_rank=1,
        replica_choices="powers" if many else "any",
        tolerance=0.01 if many else 0.0,
    )


def takes_replicas(options: PlanOptions) -> bool:
    """Whether the planner and the runtime can replicate stages under this schedule."""
    return options.schedule_needs.replicas and REGISTRY[options.schedule].replicas


def schedules(name: str) -> tuple[str, ...]:
    """Return the schedules to try.

    ``auto``: those that the planner knows and that give plain training's result with a stage a rank. One that splits
    the backward is not among them: the profile has no times of the halves. Nor is one that needs more stages than
    ranks, or a file.
    """
    if name != "auto":
        return (name,)
    kinds = [kind for kind in REGISTRY.values() if kind.synchronous and kind.name in NEEDS]
    plain = [kind.name for kind in kinds if not kind.splits_backward and kind.name not in {*_STAGES_PER_RANK, "custom"}]
    return tuple(sorted(plain, key=lambda name: name != _AUTO_FIRST))


def most_stages(found: Profile) -> int:
    """Return how many stages the model can be cut into."""
    return len(Cuts(found.graph).legal) + 1
