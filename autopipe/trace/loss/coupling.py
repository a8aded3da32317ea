"""Detect losses whose samples depend on one another: microbatches then compute something other than the batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from autopipe.errors import ModelFileError
from autopipe.ir.graph import Graph
from autopipe.ir.module_names import called
from autopipe.ir.shares import Shares
from autopipe.trace.loss.divisor import Divisor
from autopipe.trace.loss.steady import difference, gradients_of, in_float32, item_in_float32, precision_of, steady
from autopipe.workload import Item, Workload
from autopipe.workload.batches.items import shapes
from autopipe.workload.cutting.find import in_dimension_one

logger = logging.getLogger(__name__)

COUPLED = 1e-3  # relative difference of the gradients that is reported
_COARSE = 8.0  # multiple of the machine epsilon that is tolerated in a coarse type such as bfloat16


def coupling_notes(
    workload: Workload, model: nn.Module, item: Item, graph: Graph, divisor: Divisor | None
) -> list[str]:
    """Compare the gradient of a batch with that of its halves, and return notes on differences and batch statistics.

    The gradients are computed near the initial weights, with the same random numbers for every sample and with the
    statistics of the complete batch in layers such as batch norm: see ``trace.loss.steady``.

    Raises: ModelFileError if dimension 1 counts the samples, and dimension 0 was assumed only by default.
    """
    notes = statistics_notes(graph)
    parts = workload.split(item, 2)
    if len(parts) < 2:
        return notes
    shares = _shares(workload, divisor, item, parts)
    try:
        with steady(workload, model, item):
            whole = gradients_of(workload, model, [item], [1.0])
            halves = gradients_of(workload, model, parts, shares.factors)
            apart = difference(whole, halves)
            limit = max(COUPLED, _COARSE * precision_of(workload, model, graph))
            if apart is not None and COUPLED < apart <= limit:
                exact = _apart_in_float32(workload, model, item, parts, shares.factors)
                apart, limit = (apart, limit) if exact is None else (exact, COUPLED)
            is_sum = apart is not None and apart > limit and _is_sum(workload, model, whole, parts, limit)
    except Exception as error:
        logger.info("a batch was not compared with its microbatches: %s", error)
        return notes
    if apart is None or apart <= limit:
        return notes
    if not is_sum:
        _refuse_samples_in_dimension_one(workload, model)
    count = workload.num_samples(item)
    cause = "the loss couples the samples of a batch"
    advice = ""
    if shares.disagreement and divisor is not None:
        cause = f"the terms of the loss divide by different numbers ({divisor.text})"
    elif is_sum:
        cause = "the loss is a sum over the samples of a batch, in a form that is not recognised"
        advice = (
            "; let it end in a torch.sum or reduction='sum', which is recognised and trained as one batch, or divide "
            "it by the number of samples"
        )
    notes.append(
        f"{cause}: the gradient of {count} samples and that of two microbatches of them differ by {apart:.2g} of "
        f"its size; training then depends on the microbatch size{advice}"
    )
    return notes


def _refuse_samples_in_dimension_one(workload: Workload, model: nn.Module) -> None:
    """Refuse sequence-first batches, which microbatches would split through their sequences.

    Called if the parts of a batch along dimension 0 do not add up to it. Along dimension 1 they do.
    """
    if not workload.assumes_samples_first:
        return
    item = workload.example_item(None)
    other = in_dimension_one(item)
    if other is None:
        return
    parts = other.split(item, 2)
    shares = Shares.of_samples([other.num_samples(part) for part in parts])
    try:
        with steady(workload, model, item):
            whole = gradients_of(workload, model, [item], [1.0])
            apart = difference(whole, gradients_of(workload, model, parts, shares.factors))
    except Exception as error:
        logger.info("a batch was not cut along dimension 1: %s", error)
        return
    if apart is not None and apart <= COUPLED:
        raise _elsewhere(workload, item)


def _elsewhere(workload: Workload, item: Item) -> ModelFileError:
    hook = workload.hooks["data"]
    return ModelFileError(
        f"dimension 1 counts the samples of a batch of {hook.label}, not dimension 0: {shapes(item)}. Microbatches "
        "along dimension 1 have the gradient of the batch, and those along dimension 0 do not",
        where=hook.place,
        remedy="define batch_dim in the model file, such as batch_dim = 1, or (1, 0) for inputs and target; or write "
        "data(batch_size), so that autopipe finds it; batch_dim = 0 splits along dimension 0 regardless",
    )


def _apart_in_float32(
    workload: Workload, model: nn.Module, item: Item, parts: list[Item], factors: Sequence[float]
) -> float | None:
    """Return the difference of the gradients in float32, or None if the model cannot run in it."""
    try:
        wide, *wide_parts = map(item_in_float32, (item, *parts))
        with in_float32(model):
            whole = gradients_of(workload, model, [wide], [1.0])
            return difference(whole, gradients_of(workload, model, wide_parts, factors))
    except Exception as error:  # the forward itself converts to the coarse type
        logger.info("a batch was not compared with its microbatches in float32: %s", error)
        return None


def _is_sum(workload: Workload, model: nn.Module, whole: Mapping[str, Tensor], parts: list[Item], limit: float) -> bool:
    """Return whether the losses of the parts add up to the loss of the batch, so that the loss is not a mean."""
    apart = difference(whole, gradients_of(workload, model, parts, [1.0] * len(parts)))
    return apart is not None and apart <= limit


def statistics_notes(graph: Graph) -> list[str]:
    """Return a note on the layers that compute statistics of the batch, if there are any."""
    normalised = normalised_layers(graph)
    if not normalised:
        return []
    others = f" and {len(normalised) - 1} more" if len(normalised) > 1 else ""
    return [
        f"batch statistics ({called(normalised[0])}{others}) are taken over each microbatch, as in a plain "
        "accumulation loop, not over the minibatch"
    ]


def normalised_layers(graph: Graph) -> list[str]:
    """Return the paths of the layers that compute statistics of the batch."""
    writers = [node for node in graph.nodes if node.buffers_written and "Norm" in node.module_type]
    return list(dict.fromkeys(node.module_path for node in writers))


def _shares(workload: Workload, divisor: Divisor | None, item: Item, parts: list[Item]) -> Shares:
    samples = [workload.num_samples(part) for part in parts]
    if divisor is None:
        return Shares.of_samples(samples)
    each = [divisor.values(workload.leaves(part)) for part in parts]
    return Shares.of(divisor.values(workload.leaves(item)), each, samples, penalty=divisor.penalty)
