"""The costs of a simulation: seconds of each instruction and each message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from autopipe.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds of one stage."""

    forward_seconds: float  # per microbatch, as the next three
    backward_seconds: float
    input_seconds: float = 0.0  # the two halves of the backward, for schedules that split it
    weight_seconds: float = 0.0
    step_seconds: float = 0.0  # per minibatch, as the next
    reduce_seconds: float = 0.0  # adding up the gradients of the replicas
    reduce_buckets: int = 1  # parts of the reduction; they become ready at equal intervals during the last backward

    def reduced(self, ended: float) -> float:
        """Return when the reduction ends, if the last backward of the slowest replica ended at ``ended``.

        Buckets are reduced one after the other, each when its share of the backward is done. Either the last bucket
        waits for the backward, or all buckets follow the first without a gap. (In the cases between, the k-th bucket is
        the first of a sequence without a gap. Its end lies between the two, because it is linear in k.)
        """
        share = 1 / self.reduce_buckets
        without_gap = ended - self.backward_seconds * (1 - share) + self.reduce_seconds
        return max(ended + self.reduce_seconds * share, without_gap)


@dataclass(frozen=True, slots=True)
class SpillCosts:
    """Seconds of the copies of a spilled stage between host and device. Each direction has a lane of its own."""

    weights: float = 0.0  # to the device, and to the host after a step
    optimizer: float = 0.0  # its state, likewise
    gradients: float = 0.0  # of the weights, in either direction, if all stages step at the end
    # per microbatch, if messages are on the host
    activations_in: float = 0.0
    activations_out: float = 0.0
    gradients_in: float = 0.0
    gradients_out: float = 0.0
    begin: float = 0.0  # of the rank's time, for each copy that it begins


@dataclass(frozen=True, slots=True)
class EdgeCosts:
    """Seconds of one message between two stages."""

    occupancy_seconds: float = 0.0  # bytes / bandwidth; messages queue for a link, which has one queue per direction
    latency_seconds: float = 0.0  # in addition, without occupying the link
    send_seconds: float = 0.0  # of the sending rank's time; 0 if a device copies without it
    receive_seconds: float = 0.0  # of the receiving rank's time


FREE = EdgeCosts()


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a whole schedule."""

    stages: tuple[StageCosts, ...]
    # (from stage, to stage) -> costs of a message, in both directions; a missing edge costs nothing
    edges: Mapping[tuple[int, int], EdgeCosts] = field(default_factory=lambda: MappingProxyType({}))
    spill: tuple[SpillCosts, ...] = ()  # of each stage; (): copies between host and device cost nothing
    cores: float = 0.0  # how many ranks can work at a time, because they share cores; 0: all

    def __post_init__(self) -> None:
        for index, stage in enumerate(self.stages):
            for name in StageCosts.__slots__:
                if not 0 <= getattr(stage, name) < float("inf"):
                    raise ScheduleError(
                        f"stage {index}: {name} must be finite and at least 0, and is {getattr(stage, name)}"
                    )

    @staticmethod
    def uniform(num_stages: int, forward: float = 1.0, backward: float = 1.0) -> Costs:
        """Return equal stages with messages that cost nothing. Each half of a split backward takes ``backward``."""
        return Costs((StageCosts(forward, backward, backward, backward),) * num_stages)
