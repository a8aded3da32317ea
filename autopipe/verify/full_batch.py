"""Compare a complete minibatch with its microbatches: the effect of gradient accumulation itself, for any plan.

In both, random operations draw the same numbers for every sample, because the masks of a complete batch cannot be those
of its microbatches. See ``trace.loss.steady``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    # how the factors are wrong: others add up to the gradient of the minibatch, and these do not
    fault: str = ""
    # each parameter, if requested
    parameters: tuple[TensorPair, ...] = ()


def full_batch(
    workload: Workload,
    item: Any,
    parts: Sequence[Any],
    factors: Sequence[float],
    device: torch.device,
    *,
    limit: float = math.inf,
    known: bool = True,
    step: bool = False,
) -> FullBatch:
    """Compare a minibatch with its weighted parts. Memory: a model, and its gradients in float64 on the CPU, twice.

    ``limit``: a larger difference needs a reason. It is the factors if others add up to the minibatch within ``limit``,
    and otherwise the samples, which then depend on one another. This needs the gradients of each part at a time.
    ``known``: whether the loss is known to divide by what the factors count. If not, other factors are a reason only if
    they are all wrong by the same number: the root of a mean is not a weighted sum, and other factors always add
    up.
    ``step``: take one optimizer step with each, from the initial weights, and with the batch statistics of each.
    Otherwise the weights are moved away from their initial values, and layers with batch statistics use those of the
    complete batch.
    """
    item, *moved = (_on(device, workload, each) for each in (item, *parts))
    model = workload.build_model().to(device)
    with steady(workload, model, item, as_it_is=step):
        whole = gradients_of(workload, model, [item], [1.0])
        accumulated = gradients_of(workload, model, moved, factors)
        error, fault = difference(whole, accumulated), ""
        if not step and error is not None and error > limit:
            fault = _fault(
                whole, [gradients_of(workload, model, [part], [1.0]) for part in moved], factors, limit, known
            )
    if not step:
        return FullBatch(error, fault)
    stepped = _stepped(workload, whole, device), _stepped(workload, accumulated, device)
    pairs = [
        TensorPair(name, _largest(whole[name], accumulated.get(name)), _largest(stepped[0][name], stepped[1].get(name)))
        for name in whole
    ]
    return FullBatch(error, parameters=tuple(pairs))


def _fault(
    whole: Mapping[str, torch.Tensor],
    each: Sequence[Mapping[str, torch.Tensor]],
    factors: Sequence[float],
    limit: float,
    known: bool,
) -> str:
    """Return how the factors differ from those that add up to the minibatch; "" if none do within ``limit``."""
    products = torch.tensor([[_product(one, other) for other in each] for one in each], dtype=torch.float64)
    wanted = torch.tensor([_product(one, whole) for one in each], dtype=torch.float64)
    if not bool(products.isfinite().all()) or not bool(wanted.isfinite().all()):
        return ""
    best = torch.linalg.pinv(products, hermitian=True) @ wanted  # least squares
    total = {
        name: torch.stack([f * part[name] for f, part in zip(best.tolist(), each, strict=True) if name in part]).sum(0)
        for name in whole
        if any(name in part for part in each)
    }
    left = difference(whole, total)
    if left is None or left > limit:
        return ""
    off = best / torch.tensor(factors, dtype=torch.float64)
    if not known and float(off.max() - off.min()) > limit * float(off.abs().max()):
        return ""
    return f"their factors are {_numbers(factors)}, and those of its gradient are {_numbers(best.tolist())}"


def _product(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    return sum(float((one[name].conj() * other[name]).real.sum()) for name in one.keys() & other.keys())


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


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
