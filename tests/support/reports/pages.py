"""Subjects of report pages: plans of any size, with a made measurement that differs from the prediction."""

from __future__ import annotations

import dataclasses
import random

from autopipe.ir.timeline import Span, Timeline
from autopipe.planning import PlanOptions, make_plan
from autopipe.planning.cost.predict import RunCosts
from autopipe.report.page import Subject
from autopipe.report.page.curves import history_of
from autopipe.report.page.timelines import Window
from support.planning_cases import even_profile, machine


def with_modules(profile, name="model.py"):
    """Return the profile with its nodes in modules: three calls to a block."""
    nodes = tuple(
        dataclasses.replace(node, module_path=f"blocks.{k // 3}.part{k % 3}", module_type="Part")
        for k, node in enumerate(profile.graph.nodes)
    )
    return dataclasses.replace(profile, graph=dataclasses.replace(profile.graph, nodes=nodes, name=name))


def slower(timeline: Timeline, factor=1.3, seed=1) -> Timeline:
    """Return the timeline as a measurement: every instruction takes longer, by another amount, and none overlap."""
    rng = random.Random(seed)
    spans = []
    for rank in range(timeline.num_ranks):
        now = 100.0
        for span in (s for s in timeline.spans if s.rank == rank):
            now = max(now, 100.0 + factor * span.start_seconds)
            end = now + (span.end_seconds - span.start_seconds) * rng.uniform(0.9, factor)
            spans.append(Span(rank, span.instruction, now, end))
            now = end
    return Timeline("measured", timeline.num_ranks, tuple(spans))


def metrics(steps, rate=50.0, samples=32):
    """Return rows of metrics: three attempts, the second after a restart, the third resumed; two evaluations."""
    rows, clock = [], 0.0
    for step in range(steps):
        clock += samples / rate * (1 + 0.1 * (step % 3))
        rows.append({"step": step, "loss": 5.0 / (1 + step), "samples": samples, "seconds": clock})
        if step == steps // 3:
            rows.append({"restart": 1, "from_step": step - 1, "ranks": 2})
        if step in (steps // 4, steps // 2):
            rows.append({"step": step + 1, "evaluation_loss": 5.2 / (1 + step), "samples": 8})
        if step == 2 * steps // 3:
            clock = 0.0
    return rows


def peaks(plan):
    """Return rows of metrics with the memory of each stage: 5% below the plan."""
    fields = {"held_bytes": 0, "weight_bytes": 0, "versions": 1, "in_flight": 1}
    places = [(stage, rank) for stage in plan.stages for rank in stage.ranks]
    sizes = [{"bytes": stage.peak_bytes * 19 // 20, "planned_bytes": stage.peak_bytes} for stage, _ in places]
    return [
        {"peak": {"stage": stage.index, "rank": rank, **size, **fields}}
        for (stage, rank), size in zip(places, sizes, strict=True)
    ]


def subject(ranks=4, microbatches=8, *, name="model.py", layers=None, skips=False, measured=True, **options) -> Subject:
    """Return a subject with a chain of equal layers, and everything measured unless ``measured`` is False."""
    profile = with_modules(even_profile(layers or 3 * ranks, seconds=1e-3, skips=skips), name)
    cluster = machine(ranks, 8.0)
    plan = make_plan(
        profile,
        cluster,
        PlanOptions(num_ranks=ranks, batch_size=microbatches, num_microbatches=microbatches, **options),
    )
    timeline = RunCosts.of(plan, profile, cluster, {}).timeline(plan, profile.graph)
    about = "this page is of a plan, which has not been trained"
    return Subject(
        title=name,
        plan=plan,
        graph=profile.graph,
        facts=(("model", name), ("device", "cpu")),
        cluster=cluster,
        profile=profile,
        predicted=timeline,
        predicted_note="one minibatch, which begins with an empty pipeline",
        measured=Window(slower(timeline), 6, 6, 11) if measured else None,
        history=history_of([*metrics(30), *peaks(plan)]) if measured else None,
        missing={} if measured else dict.fromkeys(("measured", "memory", "curves"), about),
    )
