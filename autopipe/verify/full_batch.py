"""Compare a complete minibatch with its microbatches: the effect of gradient accumulation itself, for any plan.

In both, random operations draw the same numbers for every sample, because the masks of a complete batch cannot be those
of its microbatches. See ``trace.loss.steady``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopipe import sparse
from autopipe.trace.loss.steady import difference, gradients_of, steady
from autopipe.workload import Workload


@dataclass(frozen=True, slots=True)
class TensorPair:
    """The largest differences of one parameter, relative to its largest value with the complete batch. None: NaN."""

    name: str
    # of its gradient
    gradient: float | None
    # of its value after one optimizer step
    weight: float | None


@dataclass(frozen=True, slots=True)
class FullBatch:
    """The comparison of a minibatch with its parts."""

    # of the gradient of all parameters, relative to its norm; None: NaN
    error: float | None
    # each parameter, if requested
    parameters: tuple[TensorPair, ...] = ()


def full_batch(
    workload: Workload,
    item: Any,
    parts: Sequence[Any],
    factors: Sequence[float],
    device: torch.device,
    *,
    step: bool = False,
) -> FullBatch:
    """Compare a minibatch with its weighted parts. Memory: a model, and its gradients in float64 on the CPU, twice.

    ``step``: take one optimizer step with each, from the initial weights, and with the batch statistics of each.
    Otherwise the weights are moved away from their initial values, and layers with batch statistics use those of the
    complete batch.
    """
    item, *moved = (_on(device, workload, each) for each in (item, *parts))
    model = workload.build_model().to(device)
    with steady(workload, model, item, as_it_is=step):
        whole = gradients_of(workload, model, [item], [1.0])
        accumulated = gradients_of(workload, model, moved, factors)
    error = difference(whole, accumulated)
    if not step:
        return FullBatch(error)
    stepped = _stepped(workload, whole, device), _stepped(workload, accumulated, device)
    pairs = [
        TensorPair(name, _largest(whole[name], accumulated.get(name)), _largest(stepped[0][name], stepped[1].get(name)))
        for name in whole
    ]
    return FullBatch(error, tuple(pairs))


def _on(device: torch.device, workload: Workload, item: Any) -> Any:
    return workload.with_leaves(item, {name: leaf.to(device) for name, leaf in workload.leaves(item).items()})


def _stepped(workload: Workload, gradients: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the weights of a new model after one step of the user's optimizer with these gradients."""
    model = workload.build_model().to(device)
    parameters = dict(model.named_parameters())
    for name, gradient in gradients.items():
        parameters[name].grad = gradient.to(device, parameters[name].dtype)
    optimizer = workload.optimizer(list(parameters.items()))
    if optimizer is not None:
        optimizer.step()
    return {name: sparse.wide(parameter.detach()).cpu() for name, parameter in parameters.items()}


def _largest(whole: torch.Tensor, other: torch.Tensor | None) -> float | None:
    if other is None or not whole.numel():
        return None if other is None else 0.0
    scale = float(whole.abs().max())
    apart = float((whole - other).abs().max())
    error = apart / scale if scale else apart
    return error if error == error else None  # noqa: PLR0124 - NaN is not itself
