"""``Plan``: which rank runs which nodes, under which schedule, and what that should cost."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from autopipe.ir.artifact import digest
from autopipe.ir.profile import WorkloadSpec
from autopipe.ir.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of nodes, ``start`` to ``stop`` (exclusive), on one rank or, replicated, on several.

    ``parameters``: every one it computes with, by first name, and what nothing reads but belongs here; ``buffers`` the
    same. Seconds: per microbatch. ``peak_bytes``: on each rank.
    """

    index: int
    start: int
    stop: int
    first: str
    last: str
    ranks: tuple[int, ...]
    parameters: tuple[str, ...]
    forward_seconds: float
    backward_seconds: float
    peak_bytes: int
    recompute: bool = False
    buffers: tuple[str, ...] = ()

    @property
    def replicas(self) -> int:
        """How many ranks run this stage, each on its share of the microbatches."""
        return len(self.ranks)

    @property
    def seconds(self) -> float:
        """Forward, backward and, with recompute, the second forward of one microbatch."""
        return self.forward_seconds * (2 if self.recompute else 1) + self.backward_seconds


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor that crosses between stages: made once, sent straight to each consumer, bytes per microbatch.

    Where a gradient flows, it comes back as a chain: the last consumer hands its gradient to the consumer before it,
    and the first consumer to the producer. Each adds its own to what it was handed, so the sum has the order of
    plain autograd, and is equal to the last bit.
    """

    value: str
    producer: int
    consumers: tuple[int, ...]
    spec: TensorSpec
    bytes: int


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter used by several stages. ``owner`` steps it and sends the new value to ``copies``.

    ``exact``: every microbatch's gradient goes along the same chain as a boundary's (bit-equal to plain training);
    else the copies add up their own over the minibatch and send the sum once.
    """

    parameter: str
    owner: int
    copies: tuple[int, ...]
    exact: bool


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the plan should do. ``step_seconds``: one minibatch. ``bottleneck_seconds``: the slowest stage."""

    step_seconds: float
    samples_per_second: float
    bubble_fraction: float
    bottleneck_seconds: float


@dataclass(frozen=True)
class Plan:
    """Stages partition the nodes; boundaries go forward only; every parameter of the model is in a stage.

    ``schedule_options``: what the schedule takes beside the layout, such as ``stages_per_rank``.
    ``notes``: what a person should know about it.
    """

    graph_digest: str
    workload: WorkloadSpec
    num_ranks: int
    stages: tuple[Stage, ...]
    boundaries: tuple[Boundary, ...]
    ties: tuple[Tie, ...]
    schedule: str
    schedule_options: dict[str, int]
    batch_size: int
    num_microbatches: int
    microbatch_size: int
    predicted: Prediction
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for index, stage in enumerate(self.stages):
            expected = self.stages[index - 1].stop if index else 0
            if stage.index != index or stage.start != expected or stage.stop <= stage.start:
                raise ValueError(f"stage {index} does not follow the one before it")
        for boundary in self.boundaries:
            if not boundary.consumers or min(boundary.consumers) <= boundary.producer:
                raise ValueError(f"boundary {boundary.value} does not go forward")
        ranks = {rank for stage in self.stages for rank in stage.ranks}
        if ranks != set(range(self.num_ranks)):
            raise ValueError(f"the stages use ranks {sorted(ranks)} of {self.num_ranks}")

    @functools.cached_property
    def digest(self) -> str:
        """Name what decides the result of a run: cuts, ranks, schedule; not the predicted figures."""
        stages = [(s.start, s.stop, s.ranks, s.parameters, s.recompute) for s in self.stages]
        return digest((self.graph_digest, stages, self.ties, self.schedule, self.schedule_options))

    @property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage."""
        return tuple(stage.ranks for stage in self.stages)
