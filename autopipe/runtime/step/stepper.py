"""``Stepper``: the end of a minibatch. Reduce gradients, finish them, step, keep copies equal, report the loss.

R takes the gradients of a minibatch out and starts to add them over the replicas. S waits for the sum and does the
rest. Whatever a rank runs between the two overlaps with the sum.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopipe.runtime.after_step import AfterStep, Averages
from autopipe.runtime.events import Reporter
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.step.finite import FiniteBuffers
from autopipe.runtime.step.gradients import GradientFinisher
from autopipe.runtime.step.losses import LossCollector
from autopipe.runtime.step.replicas import ReplicaSync
from autopipe.runtime.step.scaler import LossScaler
from autopipe.runtime.step.sharding import OptimizerShard
from autopipe.runtime.step.ties import TieExchange
from autopipe.runtime.training_state.stage import Training
from autopipe.team import add_together


@dataclass(slots=True, kw_only=True)
class Stepper:
    """Steps the stages of one rank. Mappings are by stage."""

    runners: Mapping[int, StageRunner]
    # None: the stage trains nothing
    optimizers: Mapping[int, Optimizer | None]
    schedulers: Mapping[int, LRScheduler | None]
    ties: TieExchange
    # of the stages that are replicated
    replicas: Mapping[int, ReplicaSync]
    gradients: GradientFinisher
    loss: LossCollector
    reporter: Reporter
    # of the replicated stages whose optimizer state is divided
    shards: Mapping[int, OptimizerShard] = field(default_factory=dict)
    # complete parameters whose gradients are summed over the members of a team
    partial: Mapping[int, Sequence[str]] = field(default_factory=dict)
    # with the policy "skip": the buffers to restore after a step that is not finite
    finite_buffers: Mapping[int, FiniteBuffers] = field(default_factory=dict)
    # calls the user's ``after_step``
    users_hook: AfterStep | None = None
    # averages of the weights (``--ema``)
    averages: Averages | None = None
    # called before the first stage of a minibatch steps; raises if it must not step
    before_step: Callable[[], None] | None = None
    # called with a stage that has stepped
    after_step: Callable[[int], None] | None = None
    # the loss of every minibatch, on rank 0
    losses: dict[int, float] = field(default_factory=dict)
    # a stage steps as soon as its own gradients are complete: nothing is agreed on with other stages
    early: bool = False
    # the number of samples of each minibatch, set by the rank that reads the data
    samples: dict[int, int] = field(default_factory=dict)
    _stepped: list[int] = field(default_factory=list)
    _skip: bool = False
    # the norm of all gradients before they were clipped
    _norm: float | None = None
    # the learning rates of this step, of all parameter groups of the first stage here that trains something
    _rates: tuple[float, ...] = ()

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale for float16."""
        return self.gradients.scaler

    @property
    def skipped(self) -> bool:
        """Whether the last step was not taken, because a gradient was not finite."""
        return self._skip

    def parameters(self, stage: int) -> dict[str, nn.Parameter]:
        """Return the parameters of a stage, by first name, as the optimizer sees them."""
        return self.runners[stage].versions.masters

    def owned(self, stage: int) -> dict[str, nn.Parameter]:
        """Return the parameters that this stage steps: all of its own, without its copies of tied ones."""
        return self.ties.owned(stage)

    def stepped(self, stage: int) -> dict[str, nn.Parameter]:
        """Return the parameters that this rank steps for a stage: all that the stage owns, or its shard of them."""
        return self.shards[stage].own if stage in self.shards else self.owned(stage)

    def training(self, stage: int) -> Training | None:
        """Return the optimizer and scheduler of a stage with its parameters. None: the stage trains nothing."""
        optimizer = self.optimizers[stage]
        return None if optimizer is None else Training(self.stepped(stage), optimizer, self.schedulers[stage])

    def overlapping(self, stage: int) -> contextlib.AbstractContextManager[None]:
        """Return the context for the last backward of a minibatch, which sends gradients as they arrive."""
        replicas = self.replicas.get(stage)
        return contextlib.nullcontext() if replicas is None else replicas.overlapping()

    def reduce(self, stage: int, minibatch: int) -> None:
        """Carry out R: take the gradients of a minibatch out and start to add them over the replicas of the stage."""
        self.runners[stage].versions.take_gradients(minibatch)
        if stage == self.loss.stage:
            self.loss.send(minibatch)
        if stage in self.replicas:
            self.replicas[stage].start()

    def step(self, stage: int, minibatch: int) -> None:
        """Carry out S. The first S of a rank completes the gradients of all its stages; the last reports the loss.

        With ``early``, each S completes the gradients of its stage.
        """
        if not self._stepped and self.before_step is not None:
            self.before_step()
        if self.early:
            self._prepare([stage], minibatch)
        elif not self._stepped:
            self._prepare(list(self.runners), minibatch)
        if not self._lends:
            self._optimize(stage)
        deferred = self.runners[stage].deferred
        if deferred is not None:
            deferred.commit()
        if stage in self.finite_buffers:
            self.finite_buffers[stage].restore_nonfinite()
        if self.users_hook is not None and not self._skip:
            self.reporter.at(f"{stage}S", waiting=True)
            self.users_hook.call(stage, minibatch)
        if self.averages is not None and not self._skip:
            self.averages.update(stage)
        self.ties.broadcast_values(stage)
        self.runners[stage].versions.end_step()
        if not self._rates:
            self._rates = _rates_of(self.optimizers[stage])
        scheduler = self.schedulers[stage]
        if scheduler is not None and not self._skip:
            scheduler.step()
        if self.after_step is not None and not self._skip:
            self.after_step(stage)
        self._stepped.append(stage)
        if len(self._stepped) == len(self.runners):
            self._stepped = []
            if self.scaler is not None:
                self.scaler.update(self._skip)
            self._report(minibatch)
            self._rates = ()

    def _prepare(self, stages: Sequence[int], minibatch: int) -> None:
        """Complete the gradients of stages, agree on them with the other ranks, and step first if any are lent."""
        for stage in stages:
            self._complete(stage, minibatch)
        for stage in stages:
            self.ties.sum_gradients(stage)
        finished = self.gradients.finish(minibatch, {stage: self.owned(stage) for stage in stages})
        self._skip, self._norm = finished.skip, finished.norm
        if self._lends:
            for stage in self.runners:
                self._optimize(stage)
            assert self.users_hook is not None
            self.users_hook.lend()

    def _complete(self, stage: int, minibatch: int) -> None:
        """Complete the gradients of one stage: wait for the sum that R started."""
        self.runners[stage].versions.begin_step(minibatch)
        if stage in self.replicas:
            self.reporter.at(f"{stage}R", waiting=True)
            self.replicas[stage].finish()
        parameters = self.parameters(stage)
        gradients = [parameters[name].grad for name in self.partial.get(stage, ())]
        add_together(self.gradients.team, [gradient for gradient in gradients if gradient is not None])

    @property
    def _lends(self) -> bool:
        """Whether a hook reads parameters of other stages: then all optimizers step before the first hook is called."""
        return self.users_hook is not None and self.users_hook.exchanges and not self._skip

    def _optimize(self, stage: int) -> None:
        optimizer = self.optimizers[stage]
        if optimizer is not None and not self._skip:
            optimizer.step()
        if stage in self.shards and not self._skip:
            self.reporter.at(f"{stage}S", waiting=True)
            self.shards[stage].exchange()
        kept = self.ties.kept_gradients(stage)
        for name, parameter in self.parameters(stage).items():
            if name not in kept:
                parameter.grad = None

    def _report(self, minibatch: int) -> None:
        loss = self.loss.collect(minibatch)
        if loss is None:
            return
        self.losses[minibatch] = loss
        samples = self.samples.pop(minibatch, 0)
        may_skip = self._skip and self.gradients.on_nonfinite == "skip"
        skipped = may_skip and (self.scaler is None or not math.isfinite(loss))
        if skipped or not math.isfinite(loss):
            policy = "skip" if skipped else "warn"
            place = self.loss.stage + 1
            self.reporter.event("nonfinite", step=minibatch, what=f"its loss is {loss}", place=place, policy=policy)
        fields = {} if self._norm is None else {"gradient_norm": self._norm}
        self.reporter.event(
            "step",
            step=minibatch,
            loss=loss,
            samples=samples,
            time=time.time(),
            learning_rates=list(self._rates),
            skipped=self._skip,
            **fields,
        )


def _rates_of(optimizer: Optimizer | None) -> tuple[float, ...]:
    """Return the learning rate of each parameter group; () if the optimizer has none."""
    groups = [] if optimizer is None else optimizer.param_groups
    return tuple(float(group["lr"]) for group in groups if "lr" in group)
