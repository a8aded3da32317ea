"""Results -> what ``--json`` prints. The keys are a contract: add freely, rename nothing."""

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
        LayerPlanResult,
        PlanResult,
        ProfileResult,
        Scaling,
        SimulateResult,
        TrainResult,
    )


def fields_of(result: Any) -> dict[str, Any]:
    """Return a result that is as flat as its document."""
    return dataclasses.asdict(result)


def profile(result: ProfileResult) -> dict[str, Any]:
    """Return the profile in short; the file has it in full.

    Sums over the nodes; ``workspace_bytes``, which a node gives back, is that of the node with most.
    """
    found = result.profile
    return {
        "path": result.path,
        "model": found.graph.name,
        "graph_digest": found.graph.digest,
        "device": dataclasses.asdict(found.device),
        "nodes": len(found.graph.nodes),
        "parameters": sum(spec.num_bytes({}) for spec in found.graph.parameters.values()),
        "measurements": [
            {
                "microbatch_size": m.microbatch_size,
                "forward_seconds": sum(cost.forward_seconds for cost in m.costs.values()),
                "backward_seconds": sum(cost.backward_seconds for cost in m.costs.values()),
                "output_bytes": sum(cost.output_bytes for cost in m.costs.values()),
                "saved_bytes": sum(cost.saved_bytes for cost in m.costs.values()),
                "workspace_bytes": max((cost.workspace_bytes for cost in m.costs.values()), default=0),
                "flops": sum(work.forward.flops + work.backward.flops for work in m.work.values()),
                "spread": m.spread,
            }
            for m in found.measurements
        ],
        "optimizer": {
            "trained_bytes": found.trained_bytes,
            "step_seconds": found.optimizer_seconds_per_byte * found.trained_bytes,
            "state_bytes": round(found.optimizer_bytes_per_byte * found.trained_bytes),
            "seconds_per_byte": found.optimizer_seconds_per_byte,
            "bytes_per_byte": found.optimizer_bytes_per_byte,
        },
        "notes": result.notes,
        "warnings": result.warnings,
    }


def _plan(found: Plan) -> dict[str, Any]:
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
                "peak_bytes": stage.peak_bytes,
                "parameters": stage.parameters,
                "recompute": stage.recompute,
            }
            for stage in found.stages
        ],
        "boundaries": [
            {"value": b.value, "producer": b.producer, "consumers": b.consumers, "spec": str(b.spec), "bytes": b.bytes}
            for b in found.boundaries
        ],
        "ties": [dataclasses.asdict(tie) for tie in found.ties],
        "ranks": found.num_ranks,
        "schedule": found.schedule,
        "batch_size": found.batch_size,
        "num_microbatches": found.num_microbatches,
        "microbatch_size": found.microbatch_size,
        "recompute": [stage.recompute for stage in found.stages],
        "predicted": dataclasses.asdict(found.predicted),
        "graph_digest": found.graph_digest,
        "plan_digest": found.digest,
    }


def plan(result: PlanResult) -> dict[str, Any]:
    """Return the plan, and how long the search took."""
    return _plan(result.plan) | {
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


def links(found: Links | None) -> dict[str, Any]:
    """Return what was measured between two ranks; nothing where it was not."""
    return {} if found is None else {"links": dataclasses.asdict(found)}


def layer_plan(result: LayerPlanResult) -> dict[str, Any]:
    """Return a plan under PipeDream's formulas, in the keys of a plan where there is such a thing."""
    layers, cost = result.layers, result.plan.cost_seconds
    place = {name: index for index, name in enumerate(layers.names)}
    stages = []
    for index, stage in enumerate(result.plan.stages):
        own = [place[name] for name in stage.layers]
        stages.append(
            {
                "index": index,
                "replicas": stage.replicas,
                "first": stage.layers[0],
                "last": stage.layers[-1],
                "layers": stage.layers,
                "seconds": sum(layers.forward_seconds[k] + layers.backward_seconds[k] for k in own),
                "parameter_bytes": sum(layers.parameter_bytes[k] for k in own),
            }
        )
    return {
        "cost_model": "pipedream",
        "model": result.name,
        "stages": stages,
        "configuration": result.plan.configuration,
        "space": result.plan.space,
        "predicted": {"step_seconds": cost, "samples_per_second": 1 / cost, "bottleneck_seconds": cost},
        "single_device_seconds": result.alone_seconds,
        "data_parallel_seconds": result.parallel_seconds,
        "cluster": dataclasses.asdict(result.cluster),
        "planning_seconds": result.planning_seconds,
        "notes": result.notes,
    }


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


def comparison(found: Comparison | None) -> dict[str, Any] | None:
    """Return the contenders, best known names first, and the verdict; None where nothing was compared."""
    if found is None:
        return None
    return {"contenders": [_contender(contender) for contender in found.contenders], "verdict": found.verdict}


def _contender(found: Contender) -> dict[str, Any]:
    return {
        "name": found.name,
        "plan": None if found.plan is None else _figures(found.plan),
        "reason": found.reason,
    }


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "stages": len(plan.stages),
        "replicas": [stage.replicas for stage in plan.stages],
        "ranks": plan.num_ranks,
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        "peak_bytes": max(stage.peak_bytes for stage in plan.stages),
        "predicted": dataclasses.asdict(plan.predicted),
    }


def _reasons(found: Explanation | None) -> dict[str, Any] | None:
    if found is None:
        return None
    other = found.runner_up
    return {
        "cuts": [dataclasses.asdict(cut) for cut in found.cuts],
        "limit": found.limit,
        "bound_seconds": found.bound_seconds,
        "gap": found.gap,
        "runner_up": None
        if other is None
        else {"cuts": [stage.first for stage in other.stages[1:]], "step_seconds": other.predicted.step_seconds},
    }


def generate(result: GenerateResult) -> dict[str, Any]:
    """Return the files, in stage order."""
    return {"files": result.files, "plan_digest": result.plan.digest, "notes": result.notes}


def simulate(result: SimulateResult) -> dict[str, Any]:
    """Return the plan with what the simulation says of it.

    ``predicted``: of a step, in the steady state where steps overlap. ``seconds``, ``bubble_fraction``,
    ``busy_seconds``: of ``timeline_of``, and so of a step only where it has a flush. ``peak_bytes``: of each rank.
    """
    timeline = result.timeline
    return _plan(result.plan) | {
        "timeline_of": "the first minibatch alone" if result.overlaps else "a step",
        "seconds": timeline.seconds,
        "bubble_fraction": timeline.bubble_fraction,
        "busy_seconds": [timeline.busy_seconds(rank) for rank in range(timeline.num_ranks)],
        "peak_bytes": timeline.peak_bytes,
        "memory_bytes": [result.cluster.memory_of(rank) or None for rank in range(timeline.num_ranks)],
        "fits": not result.misfit,
        "grid": result.grid,
        "path": result.path,
        "trace": result.trace or None,
        "notes": result.notes,
        "warnings": [result.misfit] if result.misfit else [],
    }


def check(report: CheckReport) -> dict[str, Any]:
    """Return every parameter's error."""
    return fields_of(report)


def train(result: TrainResult) -> dict[str, Any]:
    """Return the run."""
    return fields_of(result)


def doctor(result: Examination) -> dict[str, Any]:
    """Return every finding."""
    return {"healthy": result.healthy, "findings": [_finding(finding) for finding in result.findings]}


def _finding(finding: Finding) -> dict[str, str]:
    """Return a finding under the keys of the document."""
    record = dataclasses.asdict(finding)
    return {"found" if name == "detail" else name: value for name, value in record.items()}
