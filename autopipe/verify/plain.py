"""Plain training of a workload by ``autopipe.reference``. Every plan is compared with it.

For schedules with staleness it keeps old weights, as docs/semantics.md defines: minibatch t reads version
max(t - delta, 0) of each parameter, where delta is that of the stage that owns it. With a ``SumOrder``, the loop adds
gradients as a plan does: those of each microbatch go to the sum of its replica and stage.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopipe.draws import seed_recurrent_layers
from autopipe.reference import minibatches
from autopipe.reference.seeded_draws import Draws
from autopipe.reference.training_loop import Loss, TrainingLoop
from autopipe.runtime.step.deferred import DeferredStatistics, ReplicaStatistics
from autopipe.runtime.step.loss_weights import Divisors
from autopipe.verify.deferred import OwnStatistics
from autopipe.verify.order import Key, ReplicaBuffers, SumOrder
from autopipe.workload import Item, Workload

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

    def loss(self, part: Any, draws: tuple[int, int, int] | None) -> Loss:
        """Run a microbatch. ``draws``: its (seed, minibatch, microbatch); None if the model draws nothing."""
        if draws is None:
            return self.workload.loss(self.model, part)
        with Draws(*draws, opaque=map(self.model.get_submodule, self.workload.spec.opaque_modules)):
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
    subject = subject or Subject(workload, device or torch.device("cpu"))
    optimizer = workload.optimizer(list(subject.parameters.items()))
    scheduler = None if optimizer is None else workload.scheduler(optimizer)
    scaler = torch.amp.GradScaler(_kind(device)) if workload.spec.precision == "fp16" else None
    older = [] if resumed is None else resumed.restore(subject, optimizer, scheduler, scaler)
    loop = _Loop(subject, settings, device, optimizer, scheduler, scaler, on_gradients)
    if resumed is not None:
        loop.step, loop.versions = resumed.step, [*older, *loop.versions]
        loop.averages.update(resumed.averages)
    losses = []
    for item in items:
        losses.append(loop.train_on(item))
        if on_step is not None:
            on_step(loop.step - 1, losses[-1])
    return PlainRun(subject, losses, loop.averages, optimizer, scheduler, scaler)


def evaluation(subject: Subject, item: Any, settings: PlainSettings, device: torch.device | None) -> float:
    """Return the loss of a minibatch in evaluation mode."""
    subject.model.eval()
    loop = _Loop(subject, replace(settings, order=None, deferred_batch_norm=False), device)
    with torch.no_grad():
        return loop.accumulate(*loop.microbatches(item))[0]


class _Loop(TrainingLoop):
    """The loop of the reference over the minibatches of a workload, which may add up in the order of a plan."""

    def __init__(
        self,
        subject: Subject,
        settings: PlainSettings,
        device: torch.device | None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
        on_gradients: OnGradients | None = None,
    ) -> None:
        super().__init__(
            subject.model,
            subject.parameters,
            functools.partial(_loss_of, subject, settings, device),
            optimizer,
            scheduler,
            scaler,
            staleness=settings.staleness,
            clip=settings.clip_norm,
            ema=settings.ema,
            after_step=subject.workload.after_step,
        )
        self.subject, self.settings = subject, settings
        self.on_gradients = on_gradients
        self.sums = _Sums(subject, settings)

    def microbatches(self, item: Any) -> tuple[list[Any], list[float]]:
        """Return the microbatches of a minibatch, and their factors."""
        workload = self.subject.workload
        parts = parts_of(workload, item, self.settings.num_microbatches)
        samples = [samples_of(workload, part) for part in parts]
        return parts, factors_of(samples, self.settings.divisors.get(self.step))[0]

    def train_on(self, item: Any) -> float:
        """Train on a minibatch, and return its loss."""
        return self.train(*self.microbatches(item))

    def read_by_forward(self, name: str) -> Iterable[nn.Parameter]:
        """Return the tensor of each stage that reads the parameter."""
        return self.subject.leaves(name).values()

    def order(self, count: int) -> Iterable[int]:
        """Return the order of the microbatches."""
        return reversed(range(count)) if self.settings.reverse else range(count)

    def begin_microbatch(self, index: int) -> None:
        """Let backward accumulate in the sums of this microbatch."""
        self.sums.begin(self.step, index)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a microbatch."""
        super().backward(loss if self.settings.enlarged == 1.0 else loss * self.settings.enlarged)

    def accumulate(self, microbatches: Sequence[Any], factors: Sequence[float]) -> tuple[float, float]:
        """Add up the gradients of the microbatches in the order of the plan."""
        loss, divisor = super().accumulate(microbatches, factors)
        self.sums.complete()
        return loss, divisor * self.settings.enlarged

    def gradients_are_complete(self) -> None:
        """Report the gradients."""
        if self.on_gradients is not None:
            self.on_gradients(self.step, self.parameters)

    def update(self) -> None:
        """Step, and update the deferred statistics."""
        super().update()
        self.sums.commit()


def _loss_of(
    subject: Subject, settings: PlainSettings, device: torch.device | None, part: Any, step: int, index: int
) -> Loss:
    """Return the loss of a microbatch."""
    workload = subject.workload
    if device is not None:
        part = workload.with_leaves(part, {n: leaf.to(device) for n, leaf in workload.leaves(part).items()})
    with settings.within(), workload.explained(part):
        return subject.loss(part, (settings.seed, step, index) if settings.draws else None)


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


# What the plain loop computes from: the parts of a minibatch and their factors, by the code of ``autopipe.reference``.
# A sample that the code of the ranks loses, or a wrong factor, would otherwise be on both sides of the comparison.


def parts_of(workload: Workload, item: Item, count: int) -> list[Item]:
    """Cut a minibatch into ``count`` parts, or as many as it has samples.

    A batch that is not cut along dimensions is cut by the user's ``split`` hook, or its list of samples.
    """
    dimensions = workload.cutting.of(item) if workload.cuts_by_dimension(item) else {}
    return minibatches.split(item, count, dimensions) if dimensions else workload.split(item, count)


def samples_of(workload: Workload, part: Item) -> int:
    """Return the number of samples of a part."""
    dimensions = workload.cutting.of(part) if workload.cuts_by_dimension(part) else {}
    return (minibatches.samples_in(part, dimensions) if dimensions else 0) or workload.num_samples(part)


def factors_of(samples: Sequence[int], divisors: Divisors | None) -> tuple[list[float], bool]:
    """Return the factor of each part's loss, and whether the terms of the loss ask for different ones."""
    if divisors is None:
        return minibatches.factors_of(samples)
    return minibatches.factors_of(samples, divisors.parts, divisors.whole, penalty=divisors.penalty)
