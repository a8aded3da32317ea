"""``check``: the difference between the plain loop over microbatches and one step of the full batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopipe.commands.prepared import Prepared
from autopipe.errors import RunError
from autopipe.generate import load_divisor
from autopipe.ir.microbatch_loss import COUPLED
from autopipe.report.results import FullBatchParameter, FullBatchReport
from autopipe.runtime.step.loss_weights import divisors_of, divisors_of_parts
from autopipe.trace.loss.coupling import normalised_layers
from autopipe.verify.full_batch import FullBatch, full_batch
from autopipe.verify.plain import factors_of, parts_of, samples_of

# of a minibatch that is compared without a step
_MOST_SAMPLES, _MOST_PARTS = 64, 8
# the most that rounding to 16 bits changes
_COARSE = 0.02
_FEWEST_PARTS = 2


def compared_with_the_whole(prepared: Prepared, *, step: bool) -> FullBatchReport:
    """Compare the gradient of the first minibatch with that of its microbatches, without stages.

    ``step``: also compare every parameter after one step. Otherwise only the first samples of a large minibatch are
    compared, because it may not fit into memory.
    """
    plan, graph, workload = prepared.plan, prepared.graph, prepared.workload
    item = next(workload.items(plan.batch_size if workload.takes_batch_size else None))
    whole = parts_of(workload, item, plan.num_microbatches)
    sizes = [samples_of(workload, part) for part in whole]
    count = len(sizes)
    if workload.cuts_by_dimension(item):
        while not step and count > _FEWEST_PARTS and (sum(sizes[:count]) > _MOST_SAMPLES or count > _MOST_PARTS):
            count -= 1
    if count < len(sizes):
        item = workload.resized(item, sum(sizes[:count]))  # microbatches as large as those of training
    parts = parts_of(workload, item, count)
    samples = [samples_of(workload, part) for part in parts]
    divisor = load_divisor(prepared.stages, graph.divisor, graph_digest=plan.graph_digest, plan_digest=plan.digest)
    each = [workload.leaves(part) for part in parts]
    if workload.cuts_by_dimension(item):
        divisors = divisors_of(divisor, workload.leaves(item), each)
    else:
        # microbatches of another structure need other code for the divisor, which does not exist
        same = all(part.keys() == each[0].keys() for part in each)
        divisors = divisors_of_parts([divisor if same else None] * len(each), each)
    factors, apart = factors_of(samples, divisors)
    device = torch.device(prepared.profile.device.kind)
    reason = ""
    try:
        full = full_batch(
            workload, item, parts, factors, device, limit=_limit(prepared), known=bool(graph.divisor), step=step
        )
    except Exception as error:  # usually out of memory; the comparison of the plan is complete
        full = FullBatch(None)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    explained = apart or prepared.profile.coupling.error or len(graph.outputs) > 1  # it returns its own weight
    return FullBatchReport(
        microbatches=len(whole),
        samples=tuple(sizes),
        error=full.error,
        reason=reason,
        divisor="the samples" if apart or not graph.divisor else graph.divisor,
        statistics=tuple(normalised_layers(graph)),
        parameters=tuple(FullBatchParameter(pair.name, pair.gradient, pair.weight) for pair in full.parameters),
        fault=_lost(prepared, item, samples, full) or ("" if explained else full.fault),
    )


def _lost(prepared: Prepared, item: Any, samples: Sequence[int], full: FullBatch) -> str:
    """Return how many samples the parts of the ``split`` hook lack; "" if they have all.

    More samples are no error: the parts may overlap, or be windows of time.
    """
    workload = prepared.workload
    total = samples_of(workload, item)
    if "split" not in workload.hooks or sum(samples) >= total:
        return ""
    if full.error is None or full.error <= _limit(prepared):
        return ""
    return f"the parts that `split` returns have {sum(samples)} samples in all, and the minibatch has {total}"


def _limit(prepared: Prepared) -> float:
    """Return the difference from the full batch that rounding explains."""
    dtypes = {spec.dtype for spec in prepared.graph.parameters.values()}
    dtypes |= {node.spec.dtype for node in prepared.graph.nodes if node.spec is not None}
    coarse = prepared.plan.workload.precision != "fp32" or not dtypes.isdisjoint(("bfloat16", "float16"))
    return _COARSE if coarse else COUPLED


def refusal_of_weights(full: FullBatchReport | None) -> RunError | None:
    """Return the error for microbatches that do not add up to the full batch, although their samples do; or None."""
    if full is None or not full.fault:
        return None
    remedy = (
        "return (loss, weight) from the loss, with the number that the loss divides by as the weight, or use "
        "--num-microbatches 1"
    )
    if "`split`" in full.fault:
        remedy = "let `split` return every sample in one of the parts"
    return RunError(f"the microbatches of the first minibatch do not add up to it: {full.fault}", remedy=remedy)
