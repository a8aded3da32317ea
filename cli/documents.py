"""The documents of ``--json``. Their keys are stable: keys may be added, but never renamed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopipe.commands.doctor import Examination
    from autopipe.ir.cluster import Links
    from autopipe.ir.plan import Plan
    from autopipe.launch.remote.finding import Finding
    from autopipe.planning import Comparison, Contender, Explanation
    from autopipe.report.results import (
        CheckReport,
        GenerateResult,
        PlanResult,
        ProfileResult,
        Scaling,
        SimulateResult,
        TrainResult,
    )


def fields_of(result: Any) -> dict[str, Any]:
    """Return the fields of a result whose document has the same keys."""
    return dataclasses.asdict(result)


def profile(result: ProfileResult) -> dict[str, Any]:
    """Return a summary of the profile, which is in the file ``path``.

    Costs are sums over the nodes. ``workspace_bytes``, which a node frees again, is the maximum over the nodes.
    """
    from autopipe.report import rates, sharding

    profile = result.profile
    return {
        "path": result.path,
        "model": profile.graph.name,
        "graph_digest": profile.graph.digest,
        "device": dataclasses.asdict(profile.device),
        "nodes": len(profile.graph.nodes),
        "parameters": sum(spec.num_bytes({}) for spec in profile.graph.parameters.values()),
        "measurements": [
            {
                "microbatch_size": m.microbatch_size,
                "forward_seconds": sum(cost.forward_seconds for cost in m.costs.values()),
                "backward_seconds": sum(cost.backward_seconds for cost in m.costs.values()),
                "output_bytes": sum(cost.output_bytes for cost in m.costs.values()),
                "saved_bytes": sum(cost.saved_bytes for cost in m.costs.values()),
                "workspace_bytes": max((cost.workspace_bytes for cost in m.costs.values()), default=0),
                "flops": sum(work.forward.flops + work.backward.flops for work in m.work.values()),
                "model_flops": m.model_flops,
                "flops_per_second": rates.of_measurement(profile, m)[0],
                "mfu": rates.of_measurement(profile, m)[1],
                "spread": m.spread,
            }
            for m in profile.measurements
        ],
        "optimizer": {
            "trained_bytes": profile.trained_bytes,
            "step_seconds": profile.optimizer_seconds_per_byte * profile.trained_bytes,
            "state_bytes": round(profile.optimizer_bytes_per_byte * profile.trained_bytes),
            "seconds_per_byte": profile.optimizer_seconds_per_byte,
            "bytes_per_byte": profile.optimizer_bytes_per_byte,
        },
        "tensor_parallelism": sharding.document(profile.graph),
        "notes": result.notes,
        "warnings": result.warnings,
    }


def plan_fields(plan: Plan) -> dict[str, Any]:
    """Return the keys of a plan."""
    return {
        "stages": [
            {
                "index": stage.index,
                "ranks": stage.ranks,
                "replicas": stage.replicas,
                "first": stage.first,
                "last": stage.last,
                "modules": stage.modules,
                "seconds": stage.seconds,
                "flops": stage.flops,
                "peak_bytes": stage.peak_bytes,
                "parameters": stage.parameters,
                "recompute": stage.recompute,
            }
            for stage in plan.stages
        ],
        "boundaries": [
            {"value": b.value, "producer": b.producer, "consumers": b.consumers, "spec": str(b.spec), "bytes": b.bytes}
            for b in plan.boundaries
        ],
        "ties": [dataclasses.asdict(tie) for tie in plan.ties],
        "ranks": plan.num_ranks,
        "team": plan.team,
        "schedule": plan.schedule,
        "batch_size": plan.batch_size,
        "num_microbatches": plan.num_microbatches,
        "microbatch_size": plan.microbatch_size,
        "recompute": [stage.recompute for stage in plan.stages],
        "predicted": dataclasses.asdict(plan.predicted),
        "graph_digest": plan.graph_digest,
        "plan_digest": plan.digest,
    }


def plan(result: PlanResult) -> dict[str, Any]:
    """Return the plan, and how long the search took."""
    return plan_fields(result.plan) | {
        "planning_seconds": result.planning_seconds,
        "cluster": dataclasses.asdict(result.cluster),
        "estimate": result.cluster.source if result.cluster.devices[0].datasheet else None,
        "path": result.path or None,
        "notes": result.notes,
        "warnings": result.warnings,
        "comparison": comparison(result.comparison),
        "explanation": [] if result.explanation is None else result.explanation.lines(),
        "reasons": _reasons(result.explanation),
    }


def links(links: Links | None) -> dict[str, Any]:
    """Return the measured links between two ranks; {} without a measurement."""
    return {} if links is None else {"links": dataclasses.asdict(links)}


def scaling(result: Scaling) -> dict[str, Any]:
    """Return a point for each number of devices."""
    return {
        "model": result.name,
        "batch_size": result.batch_size,
        "points": [
            {
                "gpus": point.gpus,
                "plan": None if point.plan is None else _figures(point.plan),
                "step_seconds": None if point.plan is None else point.plan.predicted.step_seconds,
                "samples_per_second": None if point.plan is None else point.plan.predicted.samples_per_second,
                "device_hours_per_million_samples": None if point.plan is None else point.device_hours,
                "reason": point.reason,
            }
            for point in result.points
        ],
        "planning_seconds": result.planning_seconds,
        "notes": result.notes,
    }


def comparison(comparison: Comparison | None) -> dict[str, Any] | None:
    """Return the contenders and the verdict; None without a comparison."""
    if comparison is None:
        return None
    contenders = [_contender(contender) for contender in comparison.contenders]
    return {"contenders": contenders, "verdict": comparison.verdict}


def _contender(contender: Contender) -> dict[str, Any]:
    return {
        "name": contender.name,
        "plan": None if contender.plan is None else _figures(contender.plan),
        "reason": contender.reason,
    }


def _figures(plan: Plan) -> dict[str, Any]:
    from autopipe.ir.plan import most_bytes

    return {
        "stages": len(plan.stages),
        "replicas": [stage.replicas for stage in plan.stages],
        "ranks": plan.num_ranks,
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        "peak_bytes": most_bytes(plan.stages),
        "predicted": dataclasses.asdict(plan.predicted),
    }


def _reasons(explanation: Explanation | None) -> dict[str, Any] | None:
    if explanation is None:
        return None
    runner_up = explanation.runner_up
    return {
        "cuts": [dataclasses.asdict(cut) for cut in explanation.cuts],
        "limit": explanation.limit,
        "bound_seconds": explanation.bound_seconds,
        "gap": explanation.gap,
        "runner_up": None
        if runner_up is None
        else {
            "cuts": [stage.first for stage in runner_up.stages[1:]],
            "step_seconds": runner_up.predicted.step_seconds,
        },
    }


def generate(result: GenerateResult) -> dict[str, Any]:
    """Return the files, in stage order."""
    return {"files": result.files, "plan_digest": result.plan.digest, "notes": result.notes}


def simulate(result: SimulateResult) -> dict[str, Any]:
    """Return the plan with the results of the simulation.

    ``predicted``: of a step; in the steady state if steps overlap. ``seconds``, ``bubble_fraction``, ``busy_seconds``:
    of the timeline that ``timeline_of`` names, which is a step only if the schedule flushes. ``peak_bytes``: by rank.
    """
    timeline = result.timeline
    return plan_fields(result.plan) | {
        "timeline_of": "the first minibatch alone" if result.overlaps else "a step",
        "seconds": timeline.seconds,
        "bubble_fraction": timeline.bubble_fraction,
        "busy_seconds": [timeline.busy_seconds(rank) for rank in range(timeline.num_ranks)],
        "peak_bytes": timeline.peak_bytes,
        "memory_bytes": [result.cluster.memory_of(rank) or None for rank in range(timeline.num_ranks)],
        "fits": not result.memory_shortfall,
        "grid": result.grid,
        "path": result.path,
        "trace": result.trace or None,
        "notes": result.notes,
        "warnings": [result.memory_shortfall] if result.memory_shortfall else [],
    }


def check(report: CheckReport) -> dict[str, Any]:
    """Return the report, with the error of every parameter."""
    return fields_of(report)


def train(result: TrainResult) -> dict[str, Any]:
    """Return the result of the run."""
    return fields_of(result)


def doctor(result: Examination) -> dict[str, Any]:
    """Return all findings."""
    return {"healthy": result.healthy, "findings": [_finding(finding) for finding in result.findings]}


def _finding(finding: Finding) -> dict[str, str]:
    """Return a finding under the keys of the document."""
    record = dataclasses.asdict(finding)
    return {"found" if name == "detail" else name: value for name, value in record.items()}
