"""Whether the samples of a batch know of one another: then microbatches are another computation than the batch."""

from __future__ import annotations

import torch
from torch import nn

from autopipe.draws import Draws
from autopipe.ir.graph import Graph
from autopipe.trace.borrowed import Snapshot
from autopipe.trace.patches import flat_checkpoints
from autopipe.workload import Item, Workload

COUPLED = 1e-3  # relative difference of the losses from which on it is said


def coupling_notes(workload: Workload, model: nn.Module, item: Item, graph: Graph) -> list[str]:
    """Return what people should know: the loss of a batch against that of its halves, and batch statistics.

    The losses are taken in evaluation mode, where neither dropout nor batch norm makes a difference of its own. Of a
    model that draws random numbers even there nothing is said.
    """
    notes = []
    writers = [node for node in graph.nodes if node.buffers_written and "Norm" in node.module_type]
    normalised = list(dict.fromkeys(node.module_path for node in writers))
    if normalised:
        others = f" and {len(normalised) - 1} more" if len(normalised) > 1 else ""
        notes.append(
            f"batch statistics ({normalised[0]}{others}) are taken over each microbatch, as in a plain accumulation "
            "loop, not over the minibatch"
        )
    whole, halves, draws_made = _losses(workload, model, item)
    if not draws_made and abs(whole - halves) > COUPLED * max(abs(whole), 1e-6):
        notes.append(
            f"the loss couples the samples of a batch: {whole:.6g} over {workload.num_samples(item)} samples, "
            f"{halves:.6g} as the mean of two microbatches; training then depends on the microbatch size"
        )
    return notes


def _losses(workload: Workload, model: nn.Module, item: Item) -> tuple[float, float, int]:
    before = Snapshot(model)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    model.eval()
    try:
        with torch.no_grad(), flat_checkpoints(), Draws(workload.spec.seed, 0, 0) as seeds:
            whole = float(workload.loss(model, item)[0])
            total = weights = 0.0
            for part in workload.split(item, 2):
                loss, weight = workload.loss(model, part)
                share = workload.num_samples(part) if weight is None else float(weight)
                total += share * float(loss)
                weights += share
            for buffer, value in buffers:
                buffer.copy_(value)
    finally:
        before.restore()
    return whole, total / weights, seeds.position
