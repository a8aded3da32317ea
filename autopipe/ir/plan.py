"""``Plan``: which rank runs which nodes, under which schedule, and at what predicted cost."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from autopipe.ir.artifact import OMIT_DEFAULT, digest
from autopipe.ir.profile import WorkloadSpec
from autopipe.ir.schedule import ScheduleSpec
from autopipe.ir.tensor import TensorSpec

RECOMPUTE_MODES = ("never", "block", "stage")
"""How a stage recomputes its forward, the fastest first.

``never``: it keeps all activations. ``block``: its units (``Stage.units``) run again one at a time, each when the
backward reaches it. ``stage``: the whole stage runs again before its backward.
"""


@dataclass(frozen=True, slots=True)
class Stage:
    """A range of nodes, on one rank or, if replicated, on several.

    Raises: ValueError if a rank, parameter or buffer appears twice, or a number is negative.
    """

    index: int
    start: int  # index of its first node
    stop: int  # index of the node after its last one
    first: str  # name of its first node
    last: str  # name of its last node
    ranks: tuple[int, ...]
    # by first name: those that its nodes read, and parameters that no node reads but that are assigned to this stage
    parameters: tuple[str, ...]
    forward_seconds: float  # per microbatch
    backward_seconds: float  # per microbatch
    peak_bytes: int  # on each of its ranks
    recompute: str = "never"  # one of ``RECOMPUTE_MODES``
    # with ``block``: the ranges of nodes (first, behind the last) that are recomputed, ascending; others are not
    units: tuple[tuple[int, int], ...] = ()
    recompute_seconds: float = 0.0  # of what runs again, per microbatch
    buffers: tuple[str, ...] = ()  # as ``parameters``
    modules: str = ""  # the names of its modules (``ir.module_names``), or "" if no call is in a module
    # takes turns with others on its device; ``peak_bytes`` is what they all have there while this one is active
    spilled: bool = field(default=False, metadata=OMIT_DEFAULT)
    flops: int = 0  # ``NodeWork.model_flops`` of its nodes, per microbatch; 0 if the profile does not have them

    def __post_init__(self) -> None:
        if not self.ranks or len(set(self.ranks)) < len(self.ranks) or min(self.ranks) < 0:
            raise ValueError(
                f"stage {self.index} needs at least one rank, and each rank once; its ranks are {list(self.ranks)}"
            )
        if len({*self.parameters}) < len(self.parameters) or len({*self.buffers}) < len(self.buffers):
            raise ValueError(f"stage {self.index} has the same parameter or buffer twice")
        if min(self.forward_seconds, self.backward_seconds, self.recompute_seconds, self.peak_bytes) < 0:
            raise ValueError(
                f"stage {self.index}: seconds and bytes must be at least 0, and are {self.forward_seconds} s forward, "
                f"{self.backward_seconds} s backward, {self.recompute_seconds} s recompute, {self.peak_bytes} bytes"
            )
        if self.recompute not in RECOMPUTE_MODES:
            raise ValueError(
                f"stage {self.index}: recompute must be one of {', '.join(RECOMPUTE_MODES)}, and is {self.recompute!r}"
            )
        if self.flops < 0:
            raise ValueError(f"stage {self.index}: flops must be at least 0, and is {self.flops}")
        edges = [self.start, *(position for unit in self.units for position in unit), self.stop]
        if bool(self.units) != (self.recompute == "block") or edges != sorted(edges):
            raise ValueError(
                f"stage {self.index}: recompute {self.recompute!r} does not agree with its units "
                f"{[list(unit) for unit in self.units]} in nodes {self.start} to {self.stop}"
            )

    @property
    def replicas(self) -> int:
        """The number of ranks that run this stage, each on its share of the microbatches."""
        return len(self.ranks)

    @property
    def name(self) -> str:
        """The human-readable name: the stage's modules, or its first and last node if it has no modules."""
        return self.modules or f"{self.first} .. {self.last}"

    @property
    def label(self) -> str:
        """The stage in a sentence: ``stage 1 (blocks.3 to blocks.5)``."""
        return f"stage {self.index} ({self.modules})" if self.modules else f"stage {self.index}"

    @property
    def seconds(self) -> float:
        """Seconds of one microbatch: forward, backward, and what is recomputed."""
        return self.forward_seconds + self.recompute_seconds + self.backward_seconds


def bytes_by_rank(stages: Iterable[Stage]) -> Counter[int]:
    """Return an upper bound of each rank's memory: the sum of its stages' peaks, or the largest if they are spilled."""
    used: Counter[int] = Counter()
    for stage in stages:
        for rank in stage.ranks:
            used[rank] = max(used[rank], stage.peak_bytes) if stage.spilled else used[rank] + stage.peak_bytes
    return used


def most_bytes(stages: Iterable[Stage]) -> int:
    """Return the memory of the rank that needs the most."""
    return max(bytes_by_rank(stages).values())


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor that crosses between stages: made by one stage, and sent directly to each consumer.

    If it has a gradient, the gradient returns as a chain: the last consumer sends its gradient to the consumer before
    it, and so on to the producer. Each stage adds its own gradient to the one that it receives. So the order of the sum
    is that of plain autograd, and the result is equal bit for bit.

    Raises: ValueError if the stages are not in ascending order.
    """

    value: str  # name of the node that makes it
    producer: int  # stage
    consumers: tuple[int, ...]  # stages, ascending
    spec: TensorSpec
    bytes: int  # per microbatch

    def __post_init__(self) -> None:
        if not self.consumers or list(self.consumers) != sorted({*self.consumers}):
            raise ValueError(
                f"boundary {self.value}: its consumers must be in ascending order, and are {list(self.consumers)}"
            )
        if not 0 <= self.producer < self.consumers[0]:
            raise ValueError(
                f"boundary {self.value} does not go forward: stage {self.producer} to stage {self.consumers[0]}"
            )
        if self.bytes < 0:
            raise ValueError(f"boundary {self.value}: bytes must be at least 0, and is {self.bytes}")


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter used by several stages. Its owner steps it and sends the new value to the copies.

    Raises: ValueError if the stages are not in ascending order.
    """

    parameter: str
    owner: int  # the first of its stages
    copies: tuple[int, ...]  # the other stages, ascending
    # True: the gradient of every microbatch takes the same chain as a boundary's, equal bit for bit to plain training.
    # False: each copy adds its gradients over the minibatch and sends the sum once.
    exact: bool

    def __post_init__(self) -> None:
        if not self.copies or list(self.copies) != sorted({*self.copies}) or not 0 <= self.owner < self.copies[0]:
            raise ValueError(
                f"{self.parameter}: the stages of a tie must be in ascending order, and are "
                f"{[self.owner, *self.copies]}"
            )


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted performance of a plan."""

    step_seconds: float  # of one minibatch
    samples_per_second: float
    bubble_fraction: float  # the part of all ranks' time in which they do not compute
    bottleneck_seconds: float  # of the slowest stage, per microbatch

    def __post_init__(self) -> None:
        # a bubble fraction may be rounded to slightly below 0
        if min(self.step_seconds, self.samples_per_second, self.bottleneck_seconds) < 0 or not (
            -1e-9 <= self.bubble_fraction <= 1
        ):
            raise ValueError(f"a prediction must be at least 0, and its bubble fraction at most 1: {self}")


@dataclass(frozen=True)
class Plan:
    """A complete plan. Stages partition the nodes, boundaries go forward, and every parameter is in a stage.

    ``ir.plan_fits_graph`` checks what depends on the graph as well.

    Raises: ValueError if its parts contradict one another.
    """

    FORMAT: ClassVar[int] = 2  # 2: recompute by block

    graph_digest: str  # of the graph that it was made for
    workload: WorkloadSpec
    num_ranks: int
    stages: tuple[Stage, ...]
    boundaries: tuple[Boundary, ...]
    ties: tuple[Tie, ...]
    schedule: str  # its name
    schedule_options: dict[str, int]  # parameters of the schedule, such as ``stages_per_rank``
    batch_size: int  # samples of a minibatch
    num_microbatches: int
    microbatch_size: int  # samples of the largest microbatch
    predicted: Prediction
    notes: tuple[str, ...] = ()  # for the user
    schedule_text: str = ""  # the user's own grid, for the schedule ``custom``
    # replicas divide the optimizer state of their stage by whole parameters
    shard_optimizer: bool = field(default=False, metadata=OMIT_DEFAULT)
    # members of each rank, which share out the tensors that carry an axis; the graph is that of a member (``ir.teams``)
    team: int = field(default=1, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a plan has at least one stage")
        for index, stage in enumerate(self.stages):
            expected = self.stages[index - 1].stop if index else 0
            if stage.index != index or stage.start != expected or stage.stop <= stage.start:
                raise ValueError(
                    f"stage {index} must be number {index} and begin at node {expected}; it is number {stage.index}, "
                    f"nodes {stage.start} to {stage.stop}"
                )
        last = len(self.stages) - 1
        for boundary in self.boundaries:
            if boundary.consumers[-1] > last:
                raise ValueError(
                    f"boundary {boundary.value} goes to stage {boundary.consumers[-1]}; there are {last + 1} stages"
                )
        for tie in self.ties:
            if tie.copies[-1] > last:
                raise ValueError(
                    f"{tie.parameter} is tied over stages {[tie.owner, *tie.copies]}; there are {last + 1} stages"
                )
        ranks = {rank for stage in self.stages for rank in stage.ranks}
        if len(ranks) != self.num_ranks or ranks != set(range(len(ranks))):
            raise ValueError(f"the stages must use all of {self.num_ranks} ranks, and use {sorted(ranks)}")
        if self.team < 1:
            raise ValueError(f"a team needs at least one member, and has {self.team}")
        if not 1 <= self.num_microbatches <= self.batch_size < 2**31:
            raise ValueError(
                f"a batch of {self.batch_size} samples cannot be split into {self.num_microbatches} microbatches"
            )
        if self.microbatch_size != -(-self.batch_size // self.num_microbatches):
            raise ValueError(
                f"{self.num_microbatches} microbatches of {self.microbatch_size} samples do not make a batch of "
                f"{self.batch_size}"
            )

    @functools.cached_property
    def digest(self) -> str:
        """The identity of what determines a run's result: cuts, ranks and schedule, without the predicted figures."""
        stages = [(s.start, s.stop, s.ranks, s.parameters, s.recompute, s.units) for s in self.stages]
        order = self.schedule, self.schedule_options, *([self.schedule_text] if self.schedule_text else [])
        # an optimizer that looks beyond a parameter steps otherwise in a shard
        sharded = [self.shard_optimizer] if self.shard_optimizer else []
        members = [("team", self.team)] if self.team > 1 else []
        return digest((self.graph_digest, stages, self.ties, *order, *sharded, *members))

    @property
    def num_processes(self) -> int:
        """The number of processes of a run: the members of all ranks."""
        return self.num_ranks * self.team

    @property
    def flops_per_sample(self) -> float:
        """Floating-point operations of training on one sample; 0 if the profile does not have them."""
        return sum(stage.flops for stage in self.stages) / self.microbatch_size

    def sharing(self, stage: Stage) -> int:
        """Return the number of replicas of a stage that divide its optimizer state; 1 if each has all of it."""
        return stage.replicas if self.shard_optimizer else 1

    @property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage."""
        return tuple(stage.ranks for stage in self.stages)

    @property
    def stage_processes(self) -> tuple[tuple[int, ...], ...]:
        """The processes of each stage: the members of its ranks, which are adjacent."""
        size = self.team
        return tuple(tuple(rank * size + m for rank in ranks for m in range(size)) for ranks in self.stage_ranks)

    def rank_of(self, process: int) -> int:
        """Return the rank of the schedule that a process is a member of."""
        return process // self.team

    def request(self, num_minibatches: int = 1) -> ScheduleSpec:
        """Return the spec of the plan's schedule for ``num_minibatches``."""
        options = dict(self.schedule_options)
        return ScheduleSpec(self.stage_ranks, self.num_microbatches, num_minibatches, 0, options, self.schedule_text)
