"""Why a plan adds up in another order than one process, and why that order is unknown."""

from __future__ import annotations

from autopipe.ir.messages import trained_ties
from autopipe.runtime.context import RunContext
from autopipe.runtime.job import Job


def why_another_order(context: RunContext) -> tuple[str, ...]:
    """Return the reasons why a plan adds up in another order than one process."""
    reasons = []
    replicated = [stage.index for stage in context.plan.stages if stage.replicas > 1]
    if replicated:
        reasons.append(f"stages {replicated} are replicated: their gradients are added up per replica first")
    reasons.extend(
        f"{tie.parameter} is tied over stages {[tie.owner, *tie.copies]}: each adds up its own gradient first"
        for tie in trained_ties(context.graph, context.plan)
        if not tie.exact
    )
    return tuple(reasons)


def why_not_bitwise(context: RunContext, job: Job) -> tuple[str, ...]:
    """Return the reasons why the order of a sum is unknown, so that equality is promised only up to rounding."""
    reasons = []
    if not context.graph.exact:
        reasons.append("the model takes another path with the same values when it is not captured (a mask of ones)")
    if context.plan.workload.precision != "fp32":
        reasons.append("autocast: a weight's cast is shared within a stage, not over the whole model")
    if job.compile:
        reasons.append("--compile: a compiler fuses operations, and rounds differently than eager code")
    if context.plan.team > 1:
        reasons.append(f"tensor parallelism: products and sums are added up in {context.plan.team} parts")
    if job.device != "cpu":
        reasons.append(f"{job.device} kernels may add up in another order from run to run")
    dtypes = {context.graph.parameters[name].dtype for stage in context.plan.stages for name in stage.parameters}
    if job.clip_grad_norm and len(dtypes) > 1:
        reasons.append(f"the norm of gradients of several types ({', '.join(sorted(dtypes))}) is rounded differently")
    return tuple(reasons)
