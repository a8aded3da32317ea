"""Plain training: one process, the user's own model, the loop anyone would write. What every plan is compared with.

For schedules with staleness it keeps old weights, as the definition says: minibatch t reads version max(t - delta, 0)
of each parameter, delta being that of the stage which owns it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopipe.draws import Draws
from autopipe.runtime.deferred import DeferredStatistics
from autopipe.trace.patches import flat_checkpoints
from autopipe.workload import Workload

OnGradients = Callable[[int, Mapping[str, nn.Parameter]], None]


@dataclass(slots=True)
class PlainRun:
    """``model``: as it is after the last step. ``losses``: one a step."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PlainSettings:
    """``draws``: give every random operation the seed of its position; needed only where the model draws at all.

    ``staleness``: per parameter name, absent ones 0. ``clip_norm`` 0: no clipping. ``reverse``: add the microbatches up
    in reverse, which is as right, and shows how much the order of a sum alone changes. ``within``: opened around every
    forward.
    """

    num_microbatches: int
    seed: int
    draws: bool = True
    clip_norm: float = 0.0
    staleness: Mapping[str, int] = field(default_factory=dict)
    reverse: bool = False
    deferred_batch_norm: bool = False
    within: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


def plain_training(
    workload: Workload,
    items: Iterable[Any],
    settings: PlainSettings,
    *,
    device: torch.device | None = None,
    on_gradients: OnGradients | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> PlainRun:
    """Train over ``items``, one optimizer step each.

    ``on_gradients``: (step, parameters) when a step's gradients are complete, before clipping.
    """
    run = PlainRun(workload.build_model().to(device or torch.device("cpu")))
    deferred = DeferredStatistics.of(run.model) if settings.deferred_batch_norm else None
    parameters = dict(run.model.named_parameters())
    optimizer = workload.optimizer(list(parameters.items()))
    scheduler = None if optimizer is None else workload.scheduler(optimizer)
    scaler = torch.amp.GradScaler(_kind(device)) if workload.spec.precision == "fp16" else None
    history = [_data(parameters)]
    for step, item in enumerate(items):
        for name, parameter in parameters.items():
            parameter.data = history[_version(step, settings.staleness.get(name, 0), len(history))][name]
        loss, divisor = _minibatch(workload, run.model, item, step, settings, device, scaler)
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
        if optimizer is not None:
            _step(optimizer, scheduler, scaler)
        if deferred is not None:
            deferred.commit()
        history.append(_data(parameters))
        del history[: -1 - max(settings.staleness.values(), default=0)]
        run.losses.append(loss)
        if on_step is not None:
            on_step(step, loss)
    return run


@contextlib.contextmanager
def _seeded(settings: PlainSettings, step: int, index: int) -> Iterator[None]:
    """Seed what the model draws. A user-level ``checkpoint()`` keeps everything: its recompute would draw again."""
    if not settings.draws:
        yield
        return
    with Draws(settings.seed, step, index), flat_checkpoints():
        yield


def _kind(device: torch.device | None) -> str:
    return "cpu" if device is None else device.type


def _step(
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    scaler: torch.amp.GradScaler | None,
) -> None:
    """Step, unless the scaler has found a gradient that is not finite; the learning rate moves with the steps."""
    stepped = True
    if scaler is None:
        optimizer.step()
    else:
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        stepped = scaler.get_scale() >= before
    optimizer.zero_grad(set_to_none=True)
    if scheduler is not None and stepped:
        scheduler.step()


def _data(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in parameters.items()}


def _version(step: int, staleness: int, held: int) -> int:
    """Return the place in the history of version max(step - staleness, 0); the newest, of version ``step``, is last."""
    return held - 1 - min(staleness, step)


def _minibatch(
    workload: Workload,
    model: nn.Module,
    item: Any,
    step: int,
    settings: PlainSettings,
    device: torch.device | None,
    scaler: torch.amp.GradScaler | None,
) -> tuple[float, float]:
    """Run forward and backward of a minibatch; return its loss, and what the gradients are to be divided by."""
    parts = workload.split(item, settings.num_microbatches)
    total = sum(workload.num_samples(part) for part in parts)
    shares: list[float] = []
    weights: list[float] = []
    for index in reversed(range(len(parts))) if settings.reverse else range(len(parts)):
        part = parts[index]
        if device is not None:
            part = workload.with_leaves(part, {n: leaf.to(device) for n, leaf in workload.leaves(part).items()})
        with _seeded(settings, step, index), settings.within(), workload.explained(part):
            loss, weight = workload.loss(model, part)
        scaled = loss * (workload.num_samples(part) / total) if weight is None else loss * weight.detach()
        if scaled.requires_grad:
            torch.autograd.backward(scaled if scaler is None else scaler.scale(scaled))
        shares.append(float(scaled.detach()))
        weights.append(0.0 if weight is None else float(weight.detach()))
    divisor = sum(weights) or 1.0
    return sum(shares) / divisor, divisor
