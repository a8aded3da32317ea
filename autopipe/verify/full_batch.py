"""One minibatch as a whole against its microbatches: what accumulation itself changes, whatever the plan.

Random operations give every sample the same numbers in both, since the masks of a whole batch cannot be those of its
microbatches. See ``trace.loss.steady``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopipe.trace.loss.steady import difference, gradients_of, steady
from autopipe.workload import Workload


@dataclass(frozen=True, slots=True)
class TensorPair:
    """How far a parameter's gradient, and the parameter after one optimizer step, are apart; None where not a number.

    Both are the largest differences, relative to the largest value in the whole batch's.
    """

    name: str
    gradient: float | None
    weight: float | None


@dataclass(frozen=True, slots=True)
class FullBatch:
    """``error``: of the gradient, all parameters together, relative to its size; None where it is not a number.

    ``parameters``: each one, where that was asked for.
    """

    error: float | None
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

    ``step``: make the optimizer step of each, from the initial weights, and with batch statistics as they fall out;
    else the weights are moved away from where they start, and layers with batch statistics use the whole batch's.
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
    return {name: parameter.detach().double().cpu() for name, parameter in parameters.items()}


def _largest(whole: torch.Tensor, other: torch.Tensor | None) -> float | None:
    if other is None or not whole.numel():
        return None if other is None else 0.0
    scale = float(whole.abs().max())
    apart = float((whole - other).abs().max())
    error = apart / scale if scale else apart
    return error if error == error else None  # noqa: PLR0124 - NaN is not itself
