"""The documents of ``--json``. Their keys are stable: keys may be added, but never renamed.

A result is its own document: ``plain`` makes a key of each field, under the ``key`` of its metadata if it has one. The
functions below summarize results that contain a plan or a profile, which are in files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.units import finite

if TYPE_CHECKING:
    from autopipe.ir.cluster import Links
    from autopipe.ir.plan import Plan
    from autopipe.planning import Comparison, Contender, Explanation
    from autopipe.report.results import GenerateResult, PlanResult, ProfileResult, Scaling, SimulateResult


def plain(value: Any) -> Any:
    """Return a value that JSON can represent: paths as texts, NaN and infinities as None, dataclasses by field."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.metadata.get("key", field.name): plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return finite(value)
    return str(value) if isinstance(value, Path) else value


def _picked(value: Any, names: str) -> dict[str, Any]:
    """Return attributes of a value, by name."""
    return {name: getattr(value, name) for name in names.split()}


def profile(result: ProfileResult) -> dict[str, Any]:
    """Return a summary of the profile, which is in the file ``path``.

    Costs are sums over the nodes. ``workspace_bytes``, which a node frees again, is the maximum over the nodes.
    """
    from autopipe.report import profiles, rates

    profile = result.profile
    return {
        "path": result.path,
        "model": profile.graph.name,
        "graph_digest": profile.graph.digest,
        "device": profile.device,
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
        "tensor_parallelism": profiles.sharding_fields(profile.graph),
        "notes": result.notes,
        "warnings": result.warnings,
    }


_STAGE = "index ranks replicas first last modules seconds flops peak_bytes parameters recompute"


def plan_fields(plan: Plan) -> dict[str, Any]:
    """Return the keys of a plan."""
    return {
        "stages": [_picked(stage, _STAGE) for stage in plan.stages],
        "boundaries": [
            _picked(boundary, "value producer consumers") | {"spec": str(boundary.spec), "bytes": boundary.bytes}
            for boundary in plan.boundaries
        ],
        "ties": plan.ties,
        "ranks": plan.num_ranks,
        **_picked(plan, "team schedule batch_size num_microbatches microbatch_size"),
        "recompute": [stage.recompute for stage in plan.stages],
        "predicted": plan.predicted,
        "graph_digest": plan.graph_digest,
        "plan_digest": plan.digest,
    }


def plan(result: PlanResult) -> dict[str, Any]:
    """Return the plan, and how long the search took."""
    return plan_fields(result.plan) | {
        "planning_seconds": result.planning_seconds,
        "cluster": result.cluster,
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
    return {} if links is None else {"links": links}


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
    plan = None if contender.plan is None else _figures(contender.plan)
    return {"name": contender.name, "plan": plan, "reason": contender.reason}


def _figures(plan: Plan) -> dict[str, Any]:
    from autopipe.ir.plan import most_bytes

    return {
        "stages": len(plan.stages),
        "replicas": [stage.replicas for stage in plan.stages],
        "ranks": plan.num_ranks,
        **_picked(plan, "schedule num_microbatches"),
        "peak_bytes": most_bytes(plan.stages),
        "predicted": plan.predicted,
    }


def _reasons(explanation: Explanation | None) -> dict[str, Any] | None:
    if explanation is None:
        return None
    runner_up = explanation.runner_up
    return {
        "cuts": explanation.cuts,
        **_picked(explanation, "limit bound_seconds gap"),
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
        **_picked(timeline, "seconds bubble_fraction"),
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
