"""Plain training: one process, the user's model, the usual loop. Every plan is compared with it.

For schedules with staleness it keeps old weights, as docs/semantics.md defines: minibatch t reads version
max(t - delta, 0) of each parameter, where delta is that of the stage that owns it. With a ``SumOrder``, the loop adds
gradients as a plan does: those of each microbatch go to the sum of its replica and stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from autopipe.draws import flat_checkpoints, seed_recurrent_layers
from autopipe.runtime.after_step.average import average_dtype
from autopipe.runtime.step.deferred import DeferredStatistics, ReplicaStatistics
from autopipe.runtime.step.shares import Divisors
from autopipe.verify.deferred import OwnStatistics
from autopipe.verify.inputs import PlainDraws, factors_of, parts_of, samples_of
from autopipe.verify.order import Key, ReplicaBuffers, SumOrder
from autopipe.workload import Workload

OnGradients = Callable[[int, Mapping[str, nn.Parameter]], None]


class Subject:
    """The module that is trained: here the user's model. The other kind is ``joined.JoinedStages``."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.workload = workload
        self.model = workload.build_model().to(device)
        seed_recurrent_layers(self.model, device)
        # those that the optimizer steps
        self.parameters = dict(self.model.named_parameters())

    def modules(self, stage: int) -> nn.Module:
        """Return the module with the buffers that a stage writes."""
        return self.model

    def leaves(self, name: str) -> Mapping[int, nn.Parameter]:
        """Return the tensors that forwards read for a parameter, by stage; -1 means every stage."""
        return {-1: self.parameters[name]}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the current buffers by first name."""
        return dict(self.model.named_buffers())

    def loss(self, part: Any, draws: tuple[int, int, int] | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a microbatch. ``draws``: its (seed, minibatch, microbatch); None if the model draws nothing.

        A ``checkpoint()`` in the user's code keeps its activations, because a recompute would draw again.
        """
        if draws is None:
            return self.workload.loss(self.model, part)
        with PlainDraws(*draws), flat_checkpoints():
            return self.workload.loss(self.model, part)


@dataclass(slots=True)
class PlainRun:
    """A finished run."""

    # after the last step
    subject: Subject
    # one per step
    losses: list[float] = field(default_factory=list)
    # of the parameters, by name, if weights are averaged
    averages: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    # of the loss in fp16
    scaler: torch.amp.GradScaler | None = None

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.subject.model


@dataclass(frozen=True, slots=True)
class PlainSettings:
    """The settings of plain training."""

    num_microbatches: int
    seed: int
    # seed every random operation by its position; needed only if the model draws
    draws: bool = True
    # 0: no clipping
    clip_norm: float = 0.0
    # by parameter name; 0 if absent
    staleness: Mapping[str, int] = field(default_factory=dict)
    # add the microbatches in reverse: equally correct, it shows the effect of the order of a sum
    reverse: bool = False
    # a factor of the loss by which the gradients are divided again: equally correct, and rounded in another way
    enlarged: float = 1.0
    deferred_batch_norm: bool = False
    # a context for every forward
    within: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    # the order of sums of a plan; None: that of one process
    order: SumOrder | None = None
    # by step, the divisors of the loss; none or None: the numbers of samples
    divisors: Mapping[int, Divisors | None] = field(default_factory=dict)
    # decay of averaged weights; 0: no averages
    ema: float = 0.0


@dataclass(frozen=True, slots=True)
class Resumed:
    """The point where training resumes."""

    # of the first minibatch
    step: int
    # called once with (subject, optimizer, scheduler, scaler): restores their state before that step, and returns the
    # older weight versions that are still read, by name, oldest first
    restore: Callable[
        [Subject, torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None, Any],
        list[dict[str, torch.Tensor]],
    ]
    # averaged weights before that step
    averages: Mapping[str, torch.Tensor] = field(default_factory=dict)


def plain_training(
    workload: Workload,
    items: Iterable[Any],
    settings: PlainSettings,
    *,
    device: torch.device | None = None,
    subject: Subject | None = None,
    on_gradients: OnGradients | None = None,
    on_step: Callable[[int, float], None] | None = None,
    resumed: Resumed | None = None,
) -> PlainRun:
    """Train over ``items``, one optimizer step each, from the start or from ``resumed``.

    ``subject`` is trained, or a new model if it is None. ``on_gradients`` is called with (step, parameters) when the
    gradients of a step are complete, before clipping.
    """
    run = PlainRun(subject or Subject(workload, device or torch.device("cpu")))
    parameters = run.subject.parameters
    optimizer = workload.optimizer(list(parameters.items()))
    scheduler = None if optimizer is None else workload.scheduler(optimizer)
    scaler = torch.amp.GradScaler(_kind(device)) if workload.spec.precision == "fp16" else None
    run.optimizer, run.scheduler, run.scaler = optimizer, scheduler, scaler
    older = [] if resumed is None else resumed.restore(run.subject, optimizer, scheduler, scaler)
    run.averages.update({} if resumed is None else resumed.averages)
    sums = _Sums(run.subject, settings)
    history = [*older, _data(parameters)]
    for step, item in enumerate(items, 0 if resumed is None else resumed.step):
        for name in parameters:
            version = history[_version(step, settings.staleness.get(name, 0), len(history))][name]
            for leaf in run.subject.leaves(name).values():
                leaf.data = version
        loss, divisor = _minibatch(workload, sums, item, step, settings, device, scaler)
        sums.complete()
        for name, parameter in parameters.items():
            parameter.data = history[-1][name].clone() if settings.staleness else history[-1][name]
        if scaler is not None and optimizer is not None:
            scaler.unscale_(optimizer)
        if divisor != 1.0:
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad /= divisor
        if on_gradients is not None:
            on_gradients(step, parameters)
        if settings.clip_norm:
            torch.nn.utils.clip_grad_norm_([p for p in parameters.values() if p.requires_grad], settings.clip_norm)
        stepped = optimizer is None or _step(optimizer, scaler)
        run.model.zero_grad(set_to_none=True)  # including parameters that the optimizer does not step
        if stepped:
            workload.after_step(list(parameters.items()), step)
            if settings.ema:
                _average(run.averages, parameters, settings.ema)
        if scheduler is not None and stepped:
            scheduler.step()
        sums.commit()
        history.append(_data(parameters))
        del history[: -1 - max(settings.staleness.values(), default=0)]
        run.losses.append(loss)
        if on_step is not None:
            on_step(step, loss)
    return run


def evaluation(
    subject: Subject, item: Any, settings: PlainSettings, device: torch.device | None, workload: Workload
) -> float:
    """Return the loss of a minibatch in evaluation mode."""
    settings = replace(settings, order=None, deferred_batch_norm=False)
    subject.model.eval()
    with torch.no_grad():
        return _minibatch(workload, _Sums(subject, settings), item, 0, settings, device, None)[0]


def _average(averages: dict[str, torch.Tensor], parameters: Mapping[str, nn.Parameter], decay: float) -> None:
    """Update averages by the function of torch. The first ones are copies."""
    update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]  # torch has no annotation for it
    for name, parameter in parameters.items():
        weight = parameter.detach().to(average_dtype(parameter.dtype), copy=True)
        if name in averages:
            update([averages[name]], [weight], None)
        else:
            averages[name] = weight


class _Sums:
    """The sums of the gradients of a minibatch: one tensor per parameter, or as many as the plan has."""

    def __init__(self, subject: Subject, settings: PlainSettings) -> None:
        self.subject, self.order = subject, settings.order
        self._kept: dict[Key, torch.Tensor | None] = {}
        self._keys: list[Key] = []
        self._replicas: dict[int, ReplicaBuffers | ReplicaStatistics] = {}
        deferred = settings.deferred_batch_norm
        self._own = OwnStatistics(subject.model) if deferred else None  # before the other, which changes the layers
        self._deferred = DeferredStatistics.of(subject.model) if deferred else None
        if self.order is None:
            return
        for stage, written in self.order.written.items():
            module = subject.modules(stage)
            first = _first_names(module)
            count, saved = self.order.replicas(stage), self.order.saved(stage)
            if self._deferred is None:
                self._replicas[stage] = ReplicaBuffers(module, written, first, count, saved)
            else:
                self._replicas[stage] = ReplicaStatistics(self._deferred, module, written, first, count)

    def begin(self, step: int, index: int) -> None:
        """Let backward accumulate in the sums of this microbatch."""
        if self.order is None:
            return
        self.end()
        self._keys = self.order.keys(step, index)
        for key in self._keys:
            self._leaf(key).grad = self._kept.get(key)
        for stage, buffers in self._replicas.items():
            buffers.use(self.order.replica(stage, step, index))

    def end(self) -> None:
        """Store the sums of the current microbatch."""
        for key in self._keys:
            leaf = self._leaf(key)
            self._kept[key], leaf.grad = leaf.grad, None
        self._keys = []

    def complete(self) -> None:
        """Set the gradient of every parameter to that of the minibatch."""
        if self.order is None:
            return
        self.end()
        for name, parameter in self.subject.parameters.items():
            parameter.grad = self.order.total(name, self._kept)
        self._kept.clear()
        for buffers in self._replicas.values():
            buffers.average()

    def commit(self) -> None:
        """Update the deferred statistics at the end of a minibatch."""
        if self._deferred is not None and self._own is not None:
            self._own.commit(self._deferred.commit)

    def _leaf(self, key: Key) -> nn.Parameter:
        leaves = self.subject.leaves(key[0])
        return leaves[key[1] if key[1] in leaves else -1]


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return every name of a buffer -> its first name."""
    first: dict[int, str] = {}
    names = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names[name] = first.setdefault(id(buffer), name)
    return names


def _kind(device: torch.device | None) -> str:
    return "cpu" if device is None else device.type


def _step(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> bool:
    """Step, unless the scaler detects a gradient that is not finite. Return whether the optimizer has stepped."""
    if scaler is None:
        optimizer.step()
        return True
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= before


def _data(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in parameters.items()}


def _version(step: int, staleness: int, count: int) -> int:
    """Return the index of version max(step - staleness, 0) in a history of ``count`` versions up to ``step``."""
    return count - 1 - min(staleness, step)


def _minibatch(
    workload: Workload,
    sums: _Sums,
    item: Any,
    step: int,
    settings: PlainSettings,
    device: torch.device | None,
    scaler: torch.amp.GradScaler | None,
) -> tuple[float, float]:
    """Run forward and backward of a minibatch. Return its loss, and the divisor of the gradients."""
    parts = parts_of(workload, item, settings.num_microbatches)
    factors, _ = factors_of([samples_of(workload, part) for part in parts], settings.divisors.get(step))
    shares: list[float] = []
    weights: list[float] = []
    for index in reversed(range(len(parts))) if settings.reverse else range(len(parts)):
        part = parts[index]
        if device is not None:
            part = workload.with_leaves(part, {n: leaf.to(device) for n, leaf in workload.leaves(part).items()})
        sums.begin(step, index)
        draws = (settings.seed, step, index) if settings.draws else None
        with settings.within(), workload.explained(part):
            loss, weight = sums.subject.loss(part, draws)
        scaled = loss * factors[index] if weight is None else loss * weight.detach()
        if weight is None and not factors[index]:
            scaled = torch.zeros_like(scaled, requires_grad=False)  # its loss may be 0 / 0
        if scaled.requires_grad:
            enlarged = scaled if settings.enlarged == 1.0 else scaled * settings.enlarged
            torch.autograd.backward(enlarged if scaler is None else scaler.scale(enlarged))
        shares.append(float(scaled.detach()))
        weights.append(0.0 if weight is None else float(weight.detach()))
    divisor = sum(weights) or 1.0
    return sum(shares) / divisor, divisor * settings.enlarged
