"""``Plan``: which rank runs which nodes, under which schedule, and what that should cost."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from autopipe.ir.artifact import digest
from autopipe.ir.profile import WorkloadSpec
from autopipe.ir.schedule import ScheduleSpec
from autopipe.ir.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of nodes, ``start`` to ``stop`` (exclusive), on one rank or, replicated, on several.

    ``parameters``: every one it computes with, by first name, and what nothing reads but belongs here; ``buffers`` the
    same. Seconds: per microbatch. ``peak_bytes``: on each rank. ``modules``: what it runs in the words of the model
    (``ir.module_names``), "" where no call is made in a module.
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
    modules: str = ""

    def __post_init__(self) -> None:
        if not self.ranks or len(set(self.ranks)) < len(self.ranks) or min(self.ranks) < 0:
            raise ValueError(f"stage {self.index} runs on ranks {list(self.ranks)}: one or more are needed, each once")
        if len({*self.parameters}) < len(self.parameters) or len({*self.buffers}) < len(self.buffers):
            raise ValueError(f"stage {self.index} holds the same parameter or buffer twice")
        if min(self.forward_seconds, self.backward_seconds, self.peak_bytes) < 0:
            raise ValueError(f"stage {self.index}: seconds and bytes are not negative")

    @property
    def replicas(self) -> int:
        """How many ranks run this stage, each on its share of the microbatches."""
        return len(self.ranks)

    @property
    def name(self) -> str:
        """The human-readable name: the stage's modules, or its first and last call if it has none."""
        return self.modules or f"{self.first} .. {self.last}"

    @property
    def label(self) -> str:
        """The stage in a sentence: ``stage 1 (blocks.3 to blocks.5)``."""
        return f"stage {self.index} ({self.modules})" if self.modules else f"stage {self.index}"

    @property
    def seconds(self) -> float:
        """Forward, backward and, with recompute, the second forward of one microbatch."""
        return self.forward_seconds * (2 if self.recompute else 1) + self.backward_seconds


def bytes_by_rank(stages: Iterable[Stage]) -> Counter[int]:
    """Return what each rank needs for its stages at most: their peaks together."""
    used: Counter[int] = Counter()
    for stage in stages:
        used.update(dict.fromkeys(stage.ranks, stage.peak_bytes))
    return used


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

    def __post_init__(self) -> None:
        if not self.consumers or list(self.consumers) != sorted({*self.consumers}):
            raise ValueError(f"boundary {self.value}: its consumers {list(self.consumers)} do not ascend")
        if not 0 <= self.producer < self.consumers[0]:
            raise ValueError(f"boundary {self.value} does not go forward")
        if self.bytes < 0:
            raise ValueError(f"boundary {self.value}: bytes are not negative")


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

    def __post_init__(self) -> None:
        if not self.copies or list(self.copies) != sorted({*self.copies}) or not 0 <= self.owner < self.copies[0]:
            raise ValueError(f"{self.parameter} is tied over stages {[self.owner, *self.copies]}, which do not ascend")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the plan should do. ``step_seconds``: one minibatch. ``bottleneck_seconds``: the slowest stage."""

    step_seconds: float
    samples_per_second: float
    bubble_fraction: float
    bottleneck_seconds: float

    def __post_init__(self) -> None:
        # -1e-9: a sum of shares is rounded
        if min(self.step_seconds, self.samples_per_second, self.bottleneck_seconds) < 0 or not (
            -1e-9 <= self.bubble_fraction <= 1
        ):
            raise ValueError("a prediction is not negative, and not more than everything is idle")


@dataclass(frozen=True)
class Plan:
    """Stages partition the nodes; boundaries go forward only; every parameter of the model is in a stage.

    ``schedule_options``: what the schedule takes beside the layout, such as ``stages_per_rank``. ``schedule_text``: the
    user's own grid, for the schedule ``custom``.
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
    schedule_text: str = ""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a plan has at least one stage")
        for index, stage in enumerate(self.stages):
            expected = self.stages[index - 1].stop if index else 0
            if stage.index != index or stage.start != expected or stage.stop <= stage.start:
                raise ValueError(f"stage {index} does not follow the one before it")
        last = len(self.stages) - 1
        for boundary in self.boundaries:
            if boundary.consumers[-1] > last:
                raise ValueError(f"boundary {boundary.value} goes to stage {boundary.consumers[-1]} of {last + 1}")
        for tie in self.ties:
            if tie.copies[-1] > last:
                raise ValueError(f"{tie.parameter} is tied over stages {[tie.owner, *tie.copies]} of {last + 1}")
        ranks = {rank for stage in self.stages for rank in stage.ranks}
        if len(ranks) != self.num_ranks or ranks != set(range(len(ranks))):
            raise ValueError(f"the stages use ranks {sorted(ranks)} of {self.num_ranks}")
        if not 1 <= self.num_microbatches <= self.batch_size < 2**31:
            raise ValueError(
                f"{self.num_microbatches} microbatches of a batch of {self.batch_size}: 1 at least, each 1"
            )
        if self.microbatch_size != -(-self.batch_size // self.num_microbatches):
            raise ValueError(
                f"{self.num_microbatches} microbatches of {self.microbatch_size} make no batch of {self.batch_size}"
            )

    @functools.cached_property
    def digest(self) -> str:
        """Name what decides the result of a run: cuts, ranks, schedule; not the predicted figures."""
        stages = [(s.start, s.stop, s.ranks, s.parameters, s.recompute) for s in self.stages]
        order = self.schedule, self.schedule_options, *([self.schedule_text] if self.schedule_text else [])
        return digest((self.graph_digest, stages, self.ties, *order))

    @property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage."""
        return tuple(stage.ranks for stage in self.stages)

    def request(self, num_minibatches: int = 1) -> ScheduleSpec:
        """Return what the plan's schedule is made for."""
        options = dict(self.schedule_options)
        return ScheduleSpec(self.stage_ranks, self.num_microbatches, num_minibatches, 0, options, self.schedule_text)
