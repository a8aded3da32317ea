"""The end of a minibatch: sum up what belongs together, clip, step, share what is tied, report the loss.

R takes a minibatch's gradients out and starts to add them up over replicas; S waits for that, and does all the rest.
What runs between the two overlaps with the sum.

All that ranks must agree on passes through ``_agree``: every rank sends rank 0 a short vector, which is zero where the
rank has nothing to say, and gets the sum back. Nothing is exchanged that the run does not need.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopipe.errors import RunError
from autopipe.ir.channel import CONTROL, TIE_GRADIENT, TIE_VALUE, Channel
from autopipe.ir.messages import loss_channel
from autopipe.ir.plan import Tie
from autopipe.ir.schedule import Request
from autopipe.runtime.after_step import AfterStep, Averages
from autopipe.runtime.events import Reporter
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.step.clipping import clip_factor
from autopipe.runtime.step.finite import FiniteBuffers, all_finite, first_nonfinite
from autopipe.runtime.step.reduction import BufferMean, GradientSum
from autopipe.runtime.step.scaler import LossScaler
from autopipe.runtime.training_state.stage import Training
from autopipe.runtime.transport.base import Transport

GradientHook = Callable[[int, int, Mapping[str, nn.Parameter]], None]


@dataclass(slots=True)
class Stepper:
    """Steps the stages of one rank.

    ``trainable``: names of all trainable parameters of the model, in its order, so that the norm of all gradients is
    added up in the order of ``torch.nn.utils.clip_grad_norm_``. ``ties``: of the plan, frozen parameters included.
    ``on_gradients``: (stage, minibatch, parameters), called when a stage's gradients are complete, before clipping.
    ``scaler``: for float16. ``losses``: of every minibatch, on rank 0. ``samples``: how many each minibatch holds, set
    by the rank that reads the data.
    ``norm_dtype``: of the norm of all gradients, as torch has it.
    ``before_step``: called before the first stage of a minibatch is stepped; raises where it must not be.
    ``sums``, ``means``: of the stages that are replicated. ``on_nonfinite``, ``kept_buffers``: see ``finite``.
    ``users_hook``: calls the user's ``after_step``; None without one. ``moving``: names of the parameters that change
    from step to step. ``averages``: of the weights; None for none. ``after_step``: called for a stage that has stepped.
    """

    request: Request
    runners: Mapping[int, StageRunner]
    optimizers: Mapping[int, Optimizer | None]
    schedulers: Mapping[int, LRScheduler | None]
    ties: Sequence[Tie]
    trainable: Sequence[str]
    transport: Transport
    reporter: Reporter
    weighted: bool
    clip_norm: float | None = None
    on_gradients: GradientHook | None = None
    scaler: LossScaler | None = None
    norm_dtype: torch.dtype = torch.float32
    on_nonfinite: str = "warn"
    kept_buffers: dict[int, FiniteBuffers] = field(default_factory=dict)
    users_hook: AfterStep | None = None
    averages: Averages | None = None
    after_step: Callable[[int], None] | None = None
    moving: frozenset[str] = frozenset()
    losses: dict[int, float] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    before_step: Callable[[], None] | None = None
    sums: dict[int, GradientSum] = field(default_factory=dict)
    means: dict[int, BufferMean] = field(default_factory=dict)
    _sent_losses: set[int] = field(default_factory=set)
    _stepped: list[int] = field(default_factory=list)
    _skip: bool = False

    @property
    def _last_stage(self) -> int:
        return self.request.num_stages - 1

    def parameters(self, stage: int) -> dict[str, nn.Parameter]:
        """Return the parameters of a stage, by first name, as the optimizer sees them."""
        return self.runners[stage].versions.masters

    @property
    def moving_ties(self) -> list[Tie]:
        """The ties whose stages exchange values: the copies of others never change."""
        return [tie for tie in self.ties if tie.parameter in self.moving]

    def owned(self, stage: int) -> dict[str, nn.Parameter]:
        """Return the parameters that this stage steps: its own, not its copies of tied ones."""
        copies = {tie.parameter for tie in self.ties if stage in tie.copies}
        return {name: p for name, p in self.parameters(stage).items() if name not in copies}

    def training(self, stage: int) -> Training | None:
        """Return what steps a stage, None where it trains nothing."""
        optimizer = self.optimizers[stage]
        return None if optimizer is None else Training(self.owned(stage), optimizer, self.schedulers[stage])

    def bring_together(self, stage: int, used: Sequence[str], written: Iterable[str], first: Mapping[str, str]) -> None:
        """Say that a stage is replicated. ``used``: its parameters in the order of their use.

        ``written``: buffers that its forwards write. ``first``: other name -> first name of state with several.
        """
        runner, group = self.runners[stage], self.request.stage_ranks[stage]
        # what every microbatch hands to the owner of a tied parameter has been added up there
        trained = {
            n: p for n, p in self.parameters(stage).items() if p.requires_grad and runner.exact_ties.get(n, True)
        }
        self.sums[stage] = GradientSum(trained, used, group, self.transport)
        self.means[stage] = BufferMean(runner.stage, written, first, group)

    def overlapping(self, stage: int) -> contextlib.AbstractContextManager[None]:
        """Return what the last backward of a minibatch runs in: gradients start on their way as they come.

        Where the sum of the minibatch before is still on its way, this one starts at R.
        """
        found = self.sums.get(stage)
        if found is None or found.busy:
            return contextlib.nullcontext()
        return found.watching(self.runners[stage].versions.in_use)

    def reduce(self, stage: int, minibatch: int) -> None:
        """Take the gradients of a minibatch out, and start to add them up over the stage's replicas.

        The losses carry their shares, so the sum of the gradients is the gradient.
        """
        self.runners[stage].versions.take_gradients(minibatch)
        if stage == self._last_stage:
            self._send_loss(minibatch)
        if stage in self.sums:
            self.sums[stage].start(self.parameters(stage))

    def _finish_reduction(self, stage: int, minibatch: int) -> None:
        """Wait for what R started, and give replicas the mean of their statistics."""
        self.runners[stage].versions.begin_step(minibatch)
        if stage in self.sums:
            self.reporter.at(f"{stage}R", waiting=True)
            self.sums[stage].finish()
        if stage not in self.means:
            return
        deferred = self.runners[stage].deferred
        if deferred is None:
            self.means[stage].average(self.transport)
            return
        for tensor in deferred.tensors():  # the sums over all replicas are those of the whole minibatch
            self.transport.all_reduce(self.means[stage].group, tensor)

    def step(self, stage: int, minibatch: int) -> None:
        """Carry out S of a stage, and after the rank's last one report the loss."""
        if not self._stepped:
            self._complete(minibatch)
            if self._lends:
                for other in self.runners:
                    self._optimize(other)
                assert self.users_hook is not None
                self.users_hook.lend()
        versions, scheduler = self.runners[stage].versions, self.schedulers[stage]
        if not self._lends:
            self._optimize(stage)
        deferred = self.runners[stage].deferred
        if deferred is not None:
            deferred.commit()
        if stage in self.kept_buffers:
            self.kept_buffers[stage].settle()
        if self.users_hook is not None and not self._skip:
            self.reporter.at(f"{stage}S", waiting=True)
            self.users_hook.call(stage, minibatch)
        if self.averages is not None and not self._skip:
            self.averages.update(stage)
        self._share_ties(stage)
        versions.end_step()
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

    @property
    def _lends(self) -> bool:
        return self.users_hook is not None and self.users_hook.exchanges and not self._skip

    def _optimize(self, stage: int) -> None:
        optimizer = self.optimizers[stage]
        if optimizer is not None and not self._skip:
            optimizer.step()
        for parameter in self.parameters(stage).values():
            parameter.grad = None

    def _complete(self, minibatch: int) -> None:
        """Bring all gradients of the rank to what the optimizer takes: ties summed, unscaled, averaged, clipped."""
        if self.before_step is not None:
            self.before_step()
        for stage in self.runners:
            self._finish_reduction(stage, minibatch)
        for stage in self.runners:
            self._sum_ties(stage)
        owned = {stage: self.owned(stage) for stage in self.runners}
        gradients = [p.grad for parameters in owned.values() for p in parameters.values() if p.grad is not None]
        if self.on_nonfinite == "stop":
            self._refuse_nonfinite(minibatch, owned)
        if self.scaler is not None or self.on_nonfinite == "skip":
            finite = all_finite(gradients) and (self.on_nonfinite != "skip" or self._loss_is_finite(minibatch))
            self._skip = bool(self._agree(torch.tensor([float(not finite)], dtype=torch.float64)) > 0)
        if self.scaler is not None:
            for gradient in gradients:
                gradient.mul_(self.scaler.inverse)
        if self.weighted:
            weights = torch.zeros(self.request.num_microbatches, dtype=torch.float64)
            if self._last_stage in self.runners:
                weights = self._shares(minibatch)[1]
            # one by one, as a plain loop adds them up: each microbatch's weight is known to one rank alone
            divisor = sum(self._agree(weights).tolist()) or 1.0
            if divisor != 1.0:
                for gradient in gradients:
                    gradient.div_(divisor)
        if self.on_gradients is not None:
            for stage, parameters in owned.items():
                self.on_gradients(stage, minibatch, parameters)
        if self.clip_norm is not None:
            leads = [owned[s] for s in owned if self.request.stage_ranks[s][0] == self.transport.rank]
            factor = clip_factor(leads, self.trainable, self.clip_norm, self.norm_dtype, self._agree)
            for gradient in gradients:
                gradient.mul_(factor)

    def _loss_is_finite(self, minibatch: int) -> bool:
        return self._last_stage not in self.runners or all_finite([self._shares(minibatch)])

    def _refuse_nonfinite(self, minibatch: int, owned: Mapping[int, Mapping[str, nn.Parameter]]) -> None:
        """End the run where this rank sees a loss or gradient that is not finite. Raises: RunError.

        An infinite gradient under a loss scale is nothing unusual: the scale comes down, and the step is left out.
        """
        found = {} if self._loss_is_finite(minibatch) else {self.request.num_stages: "its loss"}
        for stage, parameters in owned.items():
            gradients = [p.grad for p in parameters.values() if p.grad is not None]
            if self.scaler is None and not all_finite(gradients):
                found[stage] = f"the gradient of {first_nonfinite(parameters)} (stage {stage})"
        if found:
            # backward goes from the loss to stage 0: what is not finite began where the number is highest
            place = max(found)
            self.reporter.event("nonfinite", step=minibatch, what=found[place], place=place, policy="stop")
            raise RunError(f"step {minibatch + 1} is not finite: {found[place]}")

    # -- tied parameters -------------------------------------------------------------------------------------------

    def _sum_ties(self, stage: int) -> None:
        """Bring the gradients of copies to their owner, where they have not come along with every microbatch.

        All replicas of a copy have the same sum by now; the first of them sends it to every replica of the owner. They
        are added up from the last stage to the owner; a stage without a gradient says so, and adds nothing.
        """
        rank = self.transport.rank
        for tie in self.ties:
            if tie.exact:
                continue
            if stage in tie.copies and rank == self.request.stage_ranks[stage][0]:
                parameter = self.parameters(stage)[tie.parameter]
                gradient = parameter.grad
                there = torch.tensor([0 if gradient is None else 1], device=parameter.device)
                for owner in self.request.stage_ranks[tie.owner]:
                    if owner in self.request.stage_ranks[stage]:  # it is at hand there
                        continue
                    channel = Channel(TIE_GRADIENT, stage, tie.owner, rank, owner)
                    self._hand_over(channel, there)
                    if gradient is not None:
                        self._hand_over(channel, gradient)
            elif stage == tie.owner:
                parameter = self.parameters(stage)[tie.parameter]
                total = None
                for copy in reversed(tie.copies):
                    if copy in self.runners:
                        part = self.parameters(copy)[tie.parameter].grad
                    else:
                        source = self.request.stage_ranks[copy][0]
                        channel = Channel(TIE_GRADIENT, copy, stage, source, rank)
                        there = self._take_over(channel, torch.zeros(1, dtype=torch.int64))
                        part = self._take_over(channel, parameter) if int(there) else None
                    total = _sum(part, total)
                parameter.grad = _sum(parameter.grad, total)

    def _share_ties(self, stage: int) -> None:
        """Give every copy of a tied parameter its owner's new value, so that they stay equal to the last bit."""
        for tie in self.moving_ties:
            if stage == tie.owner:
                parameter = self.parameters(stage)[tie.parameter]
                owners = self.request.stage_ranks[stage]
                for copy in tie.copies:
                    if copy in self.runners:
                        self.parameters(copy)[tie.parameter].data = parameter.data.clone()
                        continue
                    for index, rank in enumerate(self.request.stage_ranks[copy]):
                        if owners[index % len(owners)] == self.transport.rank:
                            self._hand_over(Channel(TIE_VALUE, stage, copy, self.transport.rank, rank), parameter.data)
            elif stage in tie.copies and tie.owner not in self.runners:
                parameter = self.parameters(stage)[tie.parameter]
                owners = self.request.stage_ranks[tie.owner]
                index = self.request.stage_ranks[stage].index(self.transport.rank)
                source = owners[index % len(owners)]
                channel = Channel(TIE_VALUE, tie.owner, stage, source, self.transport.rank)
                parameter.data = self._take_over(channel, parameter)

    def _hand_over(self, channel: Channel, tensor: torch.Tensor) -> None:
        # the owner steps in place next time: what is still on its way must not change with it
        self.transport.send(channel, tensor.detach().clone())

    def _take_over(self, channel: Channel, like: torch.Tensor) -> torch.Tensor:
        self.reporter.at(f"{channel.to_stage}S", waiting=True)
        return self.transport.receive(channel, like.shape, like.dtype).wait()

    # -- what all ranks agree on -----------------------------------------------------------------------------------

    def _agree(self, vector: torch.Tensor) -> torch.Tensor:
        rank, world = self.transport.rank, self.transport.world_size
        if world == 1:
            return vector
        self.reporter.at("agree", waiting=True)
        if rank != 0:
            self.transport.send(Channel(CONTROL, 0, 0, rank, 0), vector)
            return self.transport.receive(Channel(CONTROL, 0, 0, 0, rank), vector.shape, vector.dtype).wait()
        total = vector.clone()
        for other in range(1, world):
            total += self.transport.receive(Channel(CONTROL, 0, 0, other, 0), vector.shape, vector.dtype).wait()
        for other in range(1, world):
            self.transport.send(Channel(CONTROL, 0, 0, 0, other), total.clone())
        return total

    # -- the loss --------------------------------------------------------------------------------------------------

    def _shares(self, minibatch: int) -> torch.Tensor:
        """Return [2, microbatches]: share of the loss and weight of every microbatch that ran here, zero elsewhere."""
        shares = torch.zeros(2, self.request.num_microbatches, dtype=torch.float64)
        for (t, j), (loss, weight) in self.runners[self._last_stage].losses.items():
            if t == minibatch:
                shares[0, j] = loss.double().cpu()
                shares[1, j] = 0.0 if weight is None else weight.double().cpu()
        return shares

    def _send_loss(self, minibatch: int) -> None:
        """Send rank 0 what this rank knows of a minibatch's loss, once. It waits for it at its own step, not here."""
        rank = self.transport.rank
        if rank in self.request.stage_ranks[self._last_stage] and rank != 0 and minibatch not in self._sent_losses:
            self._sent_losses.add(minibatch)
            self.transport.send(loss_channel(self.request, rank), self._shares(minibatch))

    def collect_loss(self, minibatch: int) -> float | None:
        """Return the loss of a minibatch on rank 0, None elsewhere. Every rank calls it."""
        ranks = self.request.stage_ranks[self._last_stage]
        rank = self.transport.rank
        total = torch.zeros(2, self.request.num_microbatches, dtype=torch.float64)
        if rank in ranks:
            self._send_loss(minibatch)
            total += self._shares(minibatch)
            self._sent_losses.discard(minibatch)
            losses = self.runners[self._last_stage].losses
            for key in [key for key in losses if key[0] == minibatch]:
                del losses[key]
        if rank != 0:
            return None
        for other in ranks:
            if other != 0:
                self.reporter.at("loss", waiting=True)
                channel = loss_channel(self.request, other)
                total += self.transport.receive(channel, total.shape, total.dtype).wait()
        loss = float(sum(total[0].tolist()))
        return loss / (float(sum(total[1].tolist())) or 1.0) if self.weighted else loss

    def _report(self, minibatch: int) -> None:
        loss = self.collect_loss(minibatch)
        if loss is not None:
            self.losses[minibatch] = loss
            samples = self.samples.pop(minibatch, 0)
            skipped = self._skip and self.on_nonfinite == "skip" and (self.scaler is None or not math.isfinite(loss))
            if skipped or not math.isfinite(loss):
                policy = "skip" if skipped else "warn"
                self.reporter.event("nonfinite", step=minibatch, what=f"its loss is {loss}", policy=policy)
            self.reporter.event("step", step=minibatch, loss=loss, samples=samples, time=time.time())


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
