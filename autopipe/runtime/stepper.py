"""The end of a minibatch: sum up what belongs together, clip, step, share what is tied, report the loss.

All that ranks must agree on passes through ``_agree``: every rank sends rank 0 a short vector, which is zero where the
rank has nothing to say, and gets the sum back. Nothing is exchanged that the run does not need.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopipe.ir.plan import Tie
from autopipe.ir.schedule import Request
from autopipe.runtime.events import Reporter
from autopipe.runtime.scaler import LossScaler
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.transport import CONTROL, TIE_GRADIENT, TIE_VALUE, Channel, Transport

GradientHook = Callable[[int, int, Mapping[str, nn.Parameter]], None]


@dataclass(slots=True)
class Stepper:
    """Steps the stages of one rank.

    ``trainable``: names of all trainable parameters of the model, in its order, so that the norm of all gradients is
    added up in the order of ``torch.nn.utils.clip_grad_norm_``. ``on_gradients``: (stage, minibatch, parameters),
    called when a stage's gradients are complete, before clipping. ``scaler``: for float16. ``losses``: of every
    minibatch, on rank 0. ``samples``: how many each minibatch holds, set by whoever reads the data.
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
    losses: dict[int, float] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    _stepped: list[int] = field(default_factory=list)
    _skip: bool = False

    @property
    def _last_stage(self) -> int:
        return self.request.num_stages - 1

    def parameters(self, stage: int) -> dict[str, nn.Parameter]:
        """Return the parameters of a stage, by first name, as the optimizer sees them."""
        return self.runners[stage].versions.masters

    def owned(self, stage: int) -> dict[str, nn.Parameter]:
        """Return the parameters that this stage steps: its own, not its copies of tied ones."""
        copies = {tie.parameter for tie in self.ties if stage in tie.copies}
        return {name: p for name, p in self.parameters(stage).items() if name not in copies}

    def reduce(self, stage: int, minibatch: int) -> None:
        """Add up the gradients of a stage's replicas, and average their buffers.

        The losses carry their shares, so the sum of the gradients is the gradient.
        """
        group = self.request.stage_ranks[stage]
        self.runners[stage].versions.begin_step(minibatch)
        parameters = [p for p in self.parameters(stage).values() if p.requires_grad]
        if len(group) < 2 or not parameters:
            return
        present = torch.tensor([float(p.grad is not None) for p in parameters])
        self.transport.all_reduce(group, present)
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
        self.transport.all_reduce(group, flat)
        offset = 0
        for parameter, found in zip(parameters, present.tolist(), strict=True):
            part = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
            parameter.grad = part.clone() if found else None
        self._average_buffers(stage, group)

    def _average_buffers(self, stage: int, group: Sequence[int]) -> None:
        """Give all replicas the mean of their running statistics; what counts batches stays each replica's own."""
        deferred = self.runners[stage].deferred
        if deferred is not None:  # the sums over all replicas are those of the whole minibatch
            for tensor in deferred.tensors():
                self.transport.all_reduce(group, tensor)
            return
        means: dict[int, torch.Tensor] = {}
        for module in self.runners[stage].stage.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or not buffer.is_floating_point():
                    continue
                if id(buffer) not in means:
                    # another tensor: without a flush, autograd has saved this one for microbatches in flight
                    mean = means[id(buffer)] = buffer.detach().clone()
                    self.transport.all_reduce(group, mean)
                    mean.div_(len(group))
                module._buffers[name] = means[id(buffer)]

    def step(self, stage: int, minibatch: int) -> None:
        """Carry out S of a stage, and after the rank's last one report the loss."""
        if not self._stepped:
            self._complete(minibatch)
        versions = self.runners[stage].versions
        optimizer, scheduler = self.optimizers[stage], self.schedulers[stage]
        if optimizer is not None and not self._skip:
            optimizer.step()
        for parameter in self.parameters(stage).values():
            parameter.grad = None
        deferred = self.runners[stage].deferred
        if deferred is not None:
            deferred.commit()
        self._share_ties(stage)
        versions.end_step()
        if scheduler is not None and not self._skip:
            scheduler.step()
        self._stepped.append(stage)
        if len(self._stepped) == len(self.runners):
            self._stepped = []
            if self.scaler is not None:
                self.scaler.update(self._skip)
            self._report(minibatch)

    def _complete(self, minibatch: int) -> None:
        """Bring all gradients of the rank to what the optimizer takes: ties summed, unscaled, averaged, clipped."""
        for stage, runner in self.runners.items():
            runner.versions.begin_step(minibatch)
            self._sum_ties(stage)
        owned = {stage: self.owned(stage) for stage in self.runners}
        gradients = [p.grad for parameters in owned.values() for p in parameters.values() if p.grad is not None]
        if self.scaler is not None:
            finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
            self._skip = bool(self._agree(torch.tensor([float(not finite)], dtype=torch.float64)) > 0)
            for gradient in gradients:
                gradient.mul_(self.scaler.inverse)
        if self.weighted:
            weights = self._shares(minibatch)[1] if self._last_stage in self.runners else torch.zeros(1)
            divisor = float(self._agree(weights.sum().reshape(1).double())) or 1.0
            if divisor != 1.0:
                for gradient in gradients:
                    gradient.div_(divisor)
        if self.on_gradients is not None:
            for stage, parameters in owned.items():
                self.on_gradients(stage, minibatch, parameters)
        if self.clip_norm is not None:
            factor = self._clip_factor(owned)
            for gradient in gradients:
                gradient.mul_(factor)

    # -- tied parameters -------------------------------------------------------------------------------------------

    def _sum_ties(self, stage: int) -> None:
        """Bring the gradients of copies to their owner, where they have not come along with every microbatch."""
        for tie in self.ties:
            if tie.exact or self.transport.rank not in self._lead(tie, stage):
                continue
            owner = self.request.stage_ranks[tie.owner][0]
            if stage in tie.copies:
                if tie.owner in self.runners:
                    continue
                parameter = self.parameters(stage)[tie.parameter]
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self._hand_over(Channel(TIE_GRADIENT, stage, tie.owner, self.transport.rank, owner), gradient)
            elif stage == tie.owner:
                parameter = self.parameters(stage)[tie.parameter]
                for copy in reversed(tie.copies):
                    if copy in self.runners:
                        local = self.parameters(copy)[tie.parameter].grad
                        parameter.grad = _sum(local, parameter.grad)
                        continue
                    source = self.request.stage_ranks[copy][0]
                    channel = Channel(TIE_GRADIENT, copy, stage, source, self.transport.rank)
                    parameter.grad = _sum(self._take_over(channel, parameter), parameter.grad)

    def _lead(self, tie: Tie, stage: int) -> tuple[int, ...]:
        return self.request.stage_ranks[stage][:1] if stage in (tie.owner, *tie.copies) else ()

    def _share_ties(self, stage: int) -> None:
        """Give every copy of a tied parameter its owner's new value, so that they stay equal to the last bit."""
        for tie in self.ties:
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

    def _clip_factor(self, owned: Mapping[int, Mapping[str, nn.Parameter]]) -> torch.Tensor:
        """Return what every gradient is multiplied with, from the norm over all stages; tied parameters count once.

        The same arithmetic as torch.nn.utils.clip_grad_norm_, in the same order of parameters.
        """
        index = {name: position for position, name in enumerate(self.trainable)}
        # a row of norms, and one that says which parameters have a gradient: torch leaves the others out of its sum
        norms = torch.zeros(2, len(index), dtype=torch.float64)
        for stage, parameters in owned.items():
            if self.request.stage_ranks[stage][0] != self.transport.rank:
                continue
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    norms[0, index[name]] = torch.linalg.vector_norm(parameter.grad).item()
                    norms[1, index[name]] = 1.0
        norms = self._agree(norms)
        total = torch.linalg.vector_norm(norms[0][norms[1] > 0].float())
        return torch.clamp(self.clip_norm / (total + 1e-6), max=1.0)

    # -- the loss --------------------------------------------------------------------------------------------------

    def _shares(self, minibatch: int) -> torch.Tensor:
        """Return [2, microbatches]: share of the loss and weight of every microbatch that ran here, zero elsewhere."""
        shares = torch.zeros(2, self.request.num_microbatches, dtype=torch.float64)
        for (t, j), (loss, weight) in self.runners[self._last_stage].losses.items():
            if t == minibatch:
                shares[0, j] = loss.double().cpu()
                shares[1, j] = 0.0 if weight is None else weight.double().cpu()
        return shares

    def collect_loss(self, minibatch: int) -> float | None:
        """Return the loss of a minibatch on rank 0, None elsewhere. Every rank calls it."""
        ranks = self.request.stage_ranks[self._last_stage]
        rank = self.transport.rank
        total = torch.zeros(2, self.request.num_microbatches, dtype=torch.float64)
        if rank in ranks:
            shares = self._shares(minibatch)
            losses = self.runners[self._last_stage].losses
            for key in [key for key in losses if key[0] == minibatch]:
                del losses[key]
            if rank != 0:
                self.transport.send(Channel(CONTROL, 0, 0, rank, 0), shares)
            total += shares
        if rank != 0:
            return None
        for other in ranks:
            if other != 0:
                self.reporter.at("loss", waiting=True)
                total += self.transport.receive(Channel(CONTROL, 0, 0, other, 0), total.shape, total.dtype).wait()
        loss = float(sum(total[0].tolist()))
        return loss / (float(sum(total[1].tolist())) or 1.0) if self.weighted else loss

    def _report(self, minibatch: int) -> None:
        loss = self.collect_loss(minibatch)
        if loss is not None:
            self.losses[minibatch] = loss
            samples = self.samples.pop(minibatch, 0)
            self.reporter.event("step", step=minibatch, loss=loss, samples=samples, time=time.time())


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
