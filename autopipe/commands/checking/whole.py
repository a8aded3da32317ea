"""``check``: the difference between the plain loop over microbatches and one step of the full batch."""

from __future__ import annotations

import torch

from autopipe.commands.steps import Prepared
from autopipe.generate import load_divisor
from autopipe.report.results import FullBatchParameter, FullBatchReport
from autopipe.runtime.step.shares import shares_of, shares_of_parts
from autopipe.trace.loss.coupling import normalised_layers
from autopipe.verify.full_batch import FullBatch, full_batch

_MOST_SAMPLES = 64
_FEWEST_PARTS = 2


def compared_with_the_whole(prepared: Prepared, *, step: bool) -> FullBatchReport:
    """Compare the gradient of the first minibatch with that of its microbatches, without stages.

    ``step``: also compare every parameter after one step. Otherwise only the first samples of a large minibatch are
    compared, because it may not fit into memory.
    """
    plan, graph, workload = prepared.plan, prepared.graph, prepared.workload
    item = next(workload.items(plan.batch_size if workload.takes_batch_size else None))
    whole = workload.split(item, plan.num_microbatches)
    sizes = [workload.num_samples(part) for part in whole]
    count = len(sizes)
    if workload.cuts_by_dimension(item):
        while not step and count > _FEWEST_PARTS and sum(sizes[:count]) > _MOST_SAMPLES:
            count -= 1
    if count < len(sizes):
        item = workload.resized(item, sum(sizes[:count]))  # microbatches as large as those of training
    parts = workload.split(item, count)
    samples = [workload.num_samples(part) for part in parts]
    divisor = load_divisor(prepared.stages, graph.divisor, graph_digest=plan.graph_digest, plan_digest=plan.digest)
    each = [workload.leaves(part) for part in parts]
    if workload.cuts_by_dimension(item):
        shares = shares_of(divisor, workload.leaves(item), each, samples)
    else:
        # microbatches of another structure need other code for the divisor, which does not exist
        same = all(part.keys() == each[0].keys() for part in each)
        shares = shares_of_parts([divisor if same else None] * len(each), each, samples)
    device = torch.device(prepared.profile.device.kind)
    reason = ""
    try:
        full = full_batch(workload, item, parts, shares.factors, device, step=step)
    except Exception as error:  # usually out of memory; the comparison of the plan is complete
        full = FullBatch(None)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return FullBatchReport(
        microbatches=len(whole),
        samples=tuple(sizes),
        error=full.error,
        reason=reason,
        divisor=graph.divisor or "the samples",
        statistics=tuple(normalised_layers(graph)),
        parameters=tuple(FullBatchParameter(pair.name, pair.gradient, pair.weight) for pair in full.parameters),
    )
