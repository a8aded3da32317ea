"""The loop of plain training: one process, one model, one optimizer step for each minibatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

Loss = tuple[torch.Tensor, torch.Tensor | None]
"""The loss of a microbatch, and its weight in the mean over the minibatch; None if a factor gives it."""


class TrainingLoop:
    """Trains a model with the gradients of minibatches, summed over their microbatches.

    ``parameters``: those to train, by name. ``loss_of``: called with (microbatch, step, index of the microbatch).
    ``staleness``: by name, how many steps older the weights are that forward and backward read. ``clip``: largest norm
    of the gradients, 0 for none. ``ema``: decay of averaged weights, 0 for none. ``after_step``: called with the named
    parameters and the step.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        loss_of: Callable[[Any, int, int], Loss],
        optimizer: torch.optim.Optimizer | None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
        *,
        staleness: Mapping[str, int] | None = None,
        clip: float = 0.0,
        ema: float = 0.0,
        after_step: Callable[[list[tuple[str, nn.Parameter]], int], object] | None = None,
    ) -> None:
        self.model, self.parameters, self.loss_of = model, dict(parameters), loss_of
        self.optimizer, self.scheduler, self.scaler = optimizer, scheduler, scaler
        self.staleness, self.clip, self.ema, self.after_step = staleness or {}, clip, ema, after_step
        self.step = 0
        # the weights of the last steps, oldest first; the last ones are the current weights
        self.versions = [self.weights()]
        # by name
        self.averages: dict[str, torch.Tensor] = {}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the current weights by name, without a copy."""
        return {name: parameter.data for name, parameter in self.parameters.items()}

    def train(self, microbatches: Sequence[Any], factors: Sequence[float]) -> float:
        """Train on a minibatch, and return its loss. ``factors``: of the losses without a weight of their own."""
        for name in self.parameters:
            age = min(self.staleness.get(name, 0), self.step)
            for tensor in self.read_by_forward(name):
                tensor.data = self.versions[-1 - age][name]
        loss, divisor = self.accumulate(microbatches, factors)
        for name, parameter in self.parameters.items():
            newest = self.versions[-1][name]
            parameter.data = newest.clone() if self.staleness else newest  # older versions are still read
        if self.scaler is not None and self.optimizer is not None:
            self.scaler.unscale_(self.optimizer)
        for parameter in self.parameters.values():
            if parameter.grad is not None and divisor != 1.0:
                parameter.grad /= divisor
        self.gradients_are_complete()
        self.update()
        self.versions.append(self.weights())
        del self.versions[: -1 - max(self.staleness.values(), default=0)]
        self.step += 1
        return loss

    def accumulate(self, microbatches: Sequence[Any], factors: Sequence[float]) -> tuple[float, float]:
        """Add up the gradients of the microbatches. Return the loss, and what the gradients must be divided by."""
        losses, weights = [], []
        for index in self.order(len(microbatches)):
            self.begin_microbatch(index)
            loss, weight = self.loss_of(microbatches[index], self.step, index)
            if weight is not None:
                loss = loss * weight.detach()
            elif factors[index]:
                loss = loss * factors[index]
            else:
                loss = torch.zeros_like(loss, requires_grad=False)  # without samples, it may be 0 / 0
            if loss.requires_grad:
                self.backward(loss)
            losses.append(float(loss.detach()))
            weights.append(0.0 if weight is None else float(weight.detach()))
        divisor = sum(weights) or 1.0
        return sum(losses) / divisor, divisor

    def update(self) -> None:
        """Step the optimizer, unless the scaler finds a gradient that is not finite, and what follows a step."""
        if self.clip:
            torch.nn.utils.clip_grad_norm_([p for p in self.parameters.values() if p.requires_grad], self.clip)
        stepped = True
        if self.scaler is not None and self.optimizer is not None:
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            stepped = self.scaler.get_scale() >= scale
        elif self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        for parameter in self.parameters.values():  # those of the loss are not in the model
            parameter.grad = None
        if stepped and self.after_step is not None:
            self.after_step(list(self.parameters.items()), self.step)
        if stepped and self.ema:
            self.average()
        if stepped and self.scheduler is not None:
            self.scheduler.step()

    @torch.no_grad()
    def average(self) -> None:
        """Average the weights, as torch's AveragedModel does."""
        for name, parameter in self.parameters.items():
            weight = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            if name in self.averages:
                self.averages[name].lerp_(weight, 1 - self.ema)
            else:
                self.averages[name] = weight

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a microbatch."""
        torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))

    # The rest is empty here: a check that repeats another order of sums, or reads the gradients, replaces it.

    def read_by_forward(self, name: str) -> Iterable[nn.Parameter]:
        """Return the tensors that forward reads for a parameter."""
        return (self.parameters[name],)

    def order(self, count: int) -> Iterable[int]:
        """Return the order of the microbatches."""
        return range(count)

    def begin_microbatch(self, index: int) -> None:
        """Prepare the sums of a microbatch."""

    def gradients_are_complete(self) -> None:
        """Read the gradients of the minibatch, before clipping."""
