"""What a simulated instruction and a simulated message take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from autopipe.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds of one stage: per microbatch, but ``step`` and ``reduce`` (of its replicas) once a minibatch.

    ``input_seconds`` and ``weight_seconds``: the halves of the backward, for schedules that split it.
    ``reduce_buckets``: parts of the reduction, evenly spread over the last backward, each of which starts by itself.
    """

    forward_seconds: float
    backward_seconds: float
    input_seconds: float = 0.0
    weight_seconds: float = 0.0
    step_seconds: float = 0.0
    reduce_seconds: float = 0.0
    reduce_buckets: int = 1

    def reduced(self, ended: float) -> float:
        """Return when the reduction ends whose slowest replica's last backward ended then.

        One bucket after the other, each once its share of the backward is done: either the last bucket has to wait for
        the backward, or all of them follow the first without a gap. (Between the two, the k-th bucket starts a gapless
        rest; that ends in between as well, because both sums are linear in k.)
        """
        one = 1 / self.reduce_buckets
        gapless = ended - self.backward_seconds * (1 - one) + self.reduce_seconds
        return max(ended + self.reduce_seconds * one, gapless)


@dataclass(frozen=True, slots=True)
class EdgeCosts:
    """Seconds of one message between two stages.

    ``occupancy_seconds``: bytes over bandwidth; messages from one rank to another queue for their link, each direction
    its own. ``latency_seconds``: on top, without occupying the link. ``send_seconds``/``receive_seconds``: what handing
    over and taking out a message costs the rank itself; 0 where a device copies on its own.
    """

    occupancy_seconds: float = 0.0
    latency_seconds: float = 0.0
    send_seconds: float = 0.0
    receive_seconds: float = 0.0


FREE = EdgeCosts()


@dataclass(frozen=True, slots=True)
class Costs:
    """``edges``: by (from stage, to stage); a forward edge goes up, a gradient edge down; missing ones cost nothing."""

    stages: tuple[StageCosts, ...]
    edges: Mapping[tuple[int, int], EdgeCosts] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for index, stage in enumerate(self.stages):
            for name in StageCosts.__slots__:
                if not 0 <= getattr(stage, name) < float("inf"):
                    raise ScheduleError(f"stage {index}: {name} is {getattr(stage, name)}; a time is 0 or more")

    @staticmethod
    def uniform(num_stages: int, forward: float = 1.0, backward: float = 1.0) -> Costs:
        """Return equal stages with free messages; each half of a backward takes ``backward`` (F = I = W at 1)."""
        return Costs((StageCosts(forward, backward, backward, backward),) * num_stages)
