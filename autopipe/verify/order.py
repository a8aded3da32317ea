"""``SumOrder``: the order in which a plan adds gradients, for a loop in one process that adds in the same order.

::

    microbatches    g0   g1   g2   g3            one process       ((g0 + g1) + g2) + g3
    replica 0       g0        g2                 two replicas      (g0 + g2) + (g1 + g3)
    replica 1            g1        g3

Each replica accumulates its own microbatches in order, and replicas are added in the order of their ranks. If stages
share a parameter and each sums its own part (``Tie.exact`` is False), the sums of the stages are added from the last
stage to the owner. Everything else is added as in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from autopipe.ir.messages import trained_ties
from autopipe.ir.schedule import ScheduleSpec
from autopipe.runtime.context import RunContext
from autopipe.runtime.job import Job

Key = tuple[str, int, int]
"""(parameter, stage, replica), whose gradients are accumulated in one tensor."""


@dataclass(frozen=True, slots=True)
class SumOrder:
    """The order of sums of one plan."""

    request: ScheduleSpec
    # by parameter, the stages that accumulate its gradient, the owner first
    homes: Mapping[str, tuple[int, ...]]
    # by replicated stage, the buffers that its forwards write; each replica has its own until the step
    written: Mapping[int, frozenset[str]]

    @staticmethod
    def of(context: RunContext) -> SumOrder:
        """Return the order of a plan."""
        homes: dict[str, tuple[int, ...]] = {}
        for stage in context.plan.stages:
            for name in stage.parameters:
                homes.setdefault(name, (stage.index,))
        for tie in trained_ties(context.graph, context.plan):
            homes[tie.parameter] = (tie.owner,) if tie.exact else (tie.owner, *tie.copies)
        replicated = [stage for stage in context.plan.stages if stage.replicas > 1]
        return SumOrder(context.request, homes, {s.index: context.buffers_written(s) for s in replicated})

    @property
    def shared(self) -> tuple[str, ...]:
        """The parameters of which several stages accumulate a part."""
        return tuple(name for name, stages in self.homes.items() if len(stages) > 1)

    @property
    def plain(self) -> bool:
        """Whether this is the order of one process."""
        return not self.shared and all(len(ranks) == 1 for ranks in self.request.stage_ranks)

    def without_shared(self) -> SumOrder:
        """Return the order in which the owner of a parameter accumulates the parts of all stages."""
        return SumOrder(self.request, {name: stages[:1] for name, stages in self.homes.items()}, self.written)

    def replicas(self, stage: int) -> int:
        """Return how many replicas a stage has."""
        return len(self.request.stage_ranks[stage])

    def replica(self, stage: int, minibatch: int, microbatch: int) -> int:
        """Return the replica of a stage that runs a microbatch: its index among the ranks of the stage, ascending."""
        ranks = sorted(self.request.stage_ranks[stage])
        return ranks.index(self.request.rank_of(stage, minibatch, microbatch))

    def saved(self, stage: int) -> int:
        """Return the replica whose buffers a checkpoint stores."""
        ranks = self.request.stage_ranks[stage]
        return sorted(ranks).index(ranks[0])

    def keys(self, minibatch: int, microbatch: int) -> list[Key]:
        """Return the keys under which the gradients of a microbatch are accumulated."""
        where = {s: self.replica(s, minibatch, microbatch) for s in range(self.request.num_stages)}
        return [(name, stage, where[stage]) for name, stages in self.homes.items() for stage in stages]

    def total(self, name: str, parts: Mapping[Key, torch.Tensor | None]) -> torch.Tensor | None:
        """Return the sum of the parts of one parameter, None if there are no parts."""
        total = None
        for stage in reversed(self.homes[name]):
            part = self._over_replicas(name, stage, parts)
            if part is not None:
                total = part if total is None else part + total
        return total

    def _over_replicas(self, name: str, stage: int, parts: Mapping[Key, torch.Tensor | None]) -> torch.Tensor | None:
        each = [parts.get((name, stage, replica)) for replica in range(self.replicas(stage))]
        present = [part for part in each if part is not None]
        if len(each) == 1 or not present:
            return present[0] if present else None
        zeros = torch.zeros(present[0].shape, dtype=present[0].dtype, device=present[0].device)
        total, *others = (zeros if part is None else part.contiguous() for part in each)
        for other in others:
            total = total + other
        return total


class ReplicaBuffers:
    """The buffers that the replicas of one stage write: one value per replica, and their mean after the step.

    ``written`` names the buffers of ``module`` by first name; ``first``: other name -> first name. After the step, the
    module has the buffers of replica ``shown``.
    """

    def __init__(
        self, module: nn.Module, written: Iterable[str], first: Mapping[str, str], replicas: int, shown: int = 0
    ) -> None:
        self._shown = shown
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        names = frozenset(written)
        for path, owner in module.named_modules(remove_duplicate=False):
            for key, buffer in owner._buffers.items():
                full = f"{path}.{key}" if path else key
                name = first.get(full, full)
                if name in names and buffer is not None:
                    self._places.setdefault(name, []).append((owner, key))
        self._each = [{n: t.clone() for n, t in self._current().items()} for _ in range(replicas)]
        self._used = -1

    def _current(self) -> dict[str, torch.Tensor]:
        current = {name: places[0][0]._buffers[places[0][1]] for name, places in self._places.items()}
        return {name: buffer for name, buffer in current.items() if buffer is not None}

    def use(self, replica: int) -> None:
        """Load the buffers of a replica into the module, after storing those of the previous replica."""
        self.keep()
        self._used = replica
        for name, tensor in self._each[replica].items():
            for owner, key in self._places[name]:
                owner._buffers[key] = tensor

    def keep(self) -> None:
        """Store the buffers of the module for the current replica."""
        if self._used >= 0:
            self._each[self._used] = self._current()

    @torch.no_grad()
    def average(self) -> None:
        """Give every replica the mean of the floating-point buffers, added in the order of the ranks."""
        self.keep()
        for name, buffer in self._each[0].items():
            if buffer.is_floating_point():
                total = buffer
                for other in self._each[1:]:
                    total = total + other[name]
                mean = total / len(self._each)
                for each in self._each:
                    each[name] = mean.clone()
        self._used = -1
        self.use(self._shown)


def why_another_order(context: RunContext) -> tuple[str, ...]:
    """Return the reasons why a plan adds up in another order than one process."""
    reasons = []
    replicated = [stage.index for stage in context.plan.stages if stage.replicas > 1]
    if replicated:
        reasons.append(f"stages {replicated} are replicated: their gradients are added up per replica first")
    reasons.extend(
        f"{tie.parameter} is tied over stages {[tie.owner, *tie.copies]}: each adds up its own gradient first"
        for tie in trained_ties(context.graph, context.plan)
        if not tie.exact
    )
    return tuple(reasons)


def why_not_bitwise(context: RunContext, job: Job) -> tuple[str, ...]:
    """Return the reasons why the order of a sum is unknown, so that equality is promised only up to rounding."""
    reasons = []
    if not context.graph.exact:
        reasons.append("the model takes another path with the same values when it is not captured (a mask of ones)")
    if context.plan.workload.precision != "fp32":
        reasons.append("autocast: a weight's cast is shared within a stage, not over the whole model")
    if job.compile:
        reasons.append("--compile: a compiler fuses operations, and rounds differently than eager code")
    if context.plan.team > 1:
        reasons.append(f"tensor parallelism: products and sums are added up in {context.plan.team} parts")
    if job.device != "cpu":
        reasons.append(f"{job.device} kernels may add up in another order from run to run")
    dtypes = {context.graph.parameters[name].dtype for stage in context.plan.stages for name in stage.parameters}
    if job.clip_grad_norm and len(dtypes) > 1:
        reasons.append(f"the norm of gradients of several types ({', '.join(sorted(dtypes))}) is rounded differently")
    return tuple(reasons)
