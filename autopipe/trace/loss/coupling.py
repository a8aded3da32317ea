"""Detect losses whose samples depend on one another: microbatches then compute something other than the batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from autopipe.devices import reraise_failure_of_device
from autopipe.errors import ModelFileError
from autopipe.ir.graph import Graph
from autopipe.ir.microbatch_loss import COUPLED, Coupling, Shares
from autopipe.ir.module_names import called
from autopipe.trace.loss.divisor import Divisor
from autopipe.trace.loss.steady import difference, gradients_of, in_float32, item_in_float32, precision_of, steady
from autopipe.workload import Item, Workload
from autopipe.workload.batches.items import shapes
from autopipe.workload.cutting.find import in_dimension_one

logger = logging.getLogger(__name__)

_MOST_PARTS = 8  # in the search for parts whose shares differ for two terms of the loss
_COARSE = 8.0  # multiple of the machine epsilon that is tolerated in a coarse type such as bfloat16


def coupling_of(workload: Workload, model: nn.Module, item: Item, graph: Graph, divisor: Divisor | None) -> Coupling:
    """Compare the gradient of a batch with that of its halves.

    The gradients are computed near the initial weights, with the same random numbers for every sample and with the
    statistics of the complete batch in layers such as batch norm: see ``trace.loss.steady``.

    Raises: ModelFileError if dimension 1 counts the samples, and dimension 0 was assumed only by default.
    """
    parts = workload.split(item, 2)
    if len(parts) < 2:
        return Coupling()
    shares = shares_of(workload, divisor, item, parts)
    if divisor is not None and len(divisor.outputs) > 1:
        item, parts, shares = _disagreeing(workload, divisor, item, parts, shares)
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
        reraise_failure_of_device(error)
        logger.info("a batch was not compared with its microbatches: %s", error)
        return Coupling()
    if apart is None or apart <= limit:
        return Coupling()
    if not is_sum:
        _refuse_samples_in_dimension_one(workload, model)
    count = workload.num_samples(item)
    cause = "the loss couples the samples of a batch"
    advice = ""
    if shares.disagreement and divisor is not None:
        cause = f"the terms of the loss divide by different numbers ({divisor.text})"
        if divisor.penalty:
            cause = f"the loss divides by {divisor.text}, and has a term that does not depend on the batch"
    elif is_sum:
        cause = "the loss is a sum over the samples of a batch, in a form that is not recognised"
        advice = (
            "; let it end in a torch.sum or reduction='sum', which is recognised and trained as one batch, or divide "
            "it by the number of samples"
        )
    return Coupling(apart, count, len(parts), cause, advice)


def _disagreeing(
    workload: Workload, divisor: Divisor, item: Item, parts: list[Item], shares: Shares
) -> tuple[Item, list[Item], Shares]:
    """Return a batch, parts of it, and their shares. In few samples, the terms of a loss may agree by chance."""
    for batch in (item, workload.example_item(None)):
        for count in range(2, min(workload.num_samples(batch), _MOST_PARTS) + 1):
            cut = workload.split(batch, count)
            of_cut = shares_of(workload, divisor, batch, cut)
            if of_cut.disagreement:
                return batch, cut, of_cut
    return item, parts, shares


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
        reraise_failure_of_device(error)
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
        reraise_failure_of_device(error)
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


def shares_of(workload: Workload, divisor: Divisor | None, item: Item, parts: list[Item]) -> Shares:
    """Return the shares of the parts of a batch in its loss. ``divisor``: None for the number of samples."""
    samples = [workload.num_samples(part) for part in parts]
    if divisor is None:
        return Shares.of_samples(samples)
    each = [divisor.values(workload.leaves(part)) for part in parts]
    return Shares.of(divisor.values(workload.leaves(item)), each, samples, penalty=divisor.penalty)
