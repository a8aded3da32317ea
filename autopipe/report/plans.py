"""The output of ``plan`` below its stages: comparisons with other plans, and explanations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from autopipe.ir.plan import Plan, most_bytes
from autopipe.units import in_bandwidth, in_bytes, in_seconds

if TYPE_CHECKING:
    from autopipe.ir.cluster import Level, Links
    from autopipe.planning import Comparison, Explanation
    from autopipe.report.results import Scaling

BAR = 50


def configuration(plan: Plan) -> str:
    """Return the ranks of each stage in the notation of the papers: ``3-1``, or ``8x1`` for eight stages of one."""
    counts = [str(stage.replicas) for stage in plan.stages]
    if len(counts) > 4 and set(counts) == {"1"}:
        return f"{len(counts)}x1"
    return "-".join(counts)


def comparison(comparison: Comparison | None) -> tuple[Any, ...]:
    """Return a table with one row per contender, and a verdict on whether a pipeline is worthwhile."""
    if comparison is None:
        return ()
    table = Table(title="compared, same minibatch", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in ("plan", "ranks a stage", "schedule"):
        table.add_column(name, overflow="fold")
    for name in ("microbatches", "a step", "samples/s", "idle", "most memory"):
        table.add_column(name, justify="right")
    reasons: list[str] = []
    for contender in comparison.contenders:
        plan = contender.plan
        if plan is None:
            table.add_row(contender.name, "none")
            reasons.append(f"no {contender.name}: {contender.reason}")
            continue
        table.add_row(
            comparison.title(contender),
            configuration(plan),
            plan.schedule,
            str(plan.num_microbatches),
            in_seconds(plan.predicted.step_seconds),
            f"{plan.predicted.samples_per_second:.4g}",
            f"{plan.predicted.bubble_fraction:.0%}" if plan.num_ranks > 1 else "-",
            in_bytes(most_bytes(plan.stages)),
        )
    return (table, *reasons, comparison.verdict)


def explanation(explanation: Explanation | None) -> tuple[str, ...]:
    """Return the reasons for the cuts, one per line; () without an explanation."""
    return () if explanation is None else ("why:", *(f"  {line}" for line in explanation.lines()))


def scaling(scaling: Scaling) -> tuple[Any, ...]:
    """Return a table with one row per number of devices, and a bar chart of the samples per second."""
    table = Table(
        title=f"{scaling.name}, minibatch of {scaling.batch_size}",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
    )
    table.add_column("devices", justify="right")
    for name in ("ranks a stage", "schedule"):
        table.add_column(name, overflow="fold")
    for name in ("microbatches", "a step", "samples/s", "device-hours a million", "most memory"):
        table.add_column(name, justify="right")
    reasons: list[str] = []
    for point in scaling.points:
        plan = point.plan
        if plan is None:
            table.add_row(str(point.gpus), "none")
            reasons.append(f"{point.gpus}: {point.reason}")
            continue
        table.add_row(
            str(point.gpus),
            configuration(plan),
            plan.schedule,
            str(plan.num_microbatches),
            in_seconds(plan.predicted.step_seconds),
            f"{plan.predicted.samples_per_second:.4g}",
            f"{point.device_hours:.4g}",
            in_bytes(most_bytes(plan.stages)),
        )
    return (
        table,
        *reasons,
        "samples per second, and the fraction of linear scaling from the first row:",
        bars(scaling),
    )


def bars(scaling: Scaling) -> str:
    """Return the bar chart: samples per second by number of devices."""
    planned = [
        (point.gpus, point.plan.predicted.samples_per_second) for point in scaling.points if point.plan is not None
    ]
    most, (first, base) = max(rate for _, rate in planned), planned[0]
    width = max(len(str(gpus)) for gpus, _ in planned)
    lines = []
    for gpus, rate in planned:
        bar = "#" * max(1, round(BAR * rate / most))
        lines.append(f"{gpus:>{width}} |{bar:<{BAR}}| {rate:.4g}/s, {rate / base * first / gpus:.0%}")
    return "\n".join(lines)


def links(links: Links | None) -> tuple[str, ...]:
    """Return the measurements between two ranks as text; () without them."""
    if links is None:
        return ()
    host = links.host
    return (
        f"between two {links.device_kind} ranks: {in_seconds(links.latency_seconds)} latency, "
        f"{in_bandwidth(links.bandwidth)}; all-reduce {in_bandwidth(links.all_reduce_bandwidth)}",
        *_across(links.across),
        *([f"between a device and its host: {in_bandwidth(links.host_bandwidth)}"] if links.host_bandwidth else []),
        f"under load, computation takes {host.pace - 1:.0%} longer than in the fastest window of a profile; "
        f"the runtime adds {in_seconds(host.compute_seconds)} to a forward or backward, "
        f"{in_seconds(host.send_seconds)} to a send, {in_seconds(host.receive_seconds)} to a receive, "
        f"{in_seconds(host.step_seconds)} to a minibatch; while ranks compute, a message "
        f"arrives {in_seconds(host.delivery_seconds)} later",
    )


def _across(level: Level | None) -> tuple[str, ...]:
    if level is None:
        return ()
    return (
        f"between two hosts: {in_seconds(level.latency_seconds)} latency, {in_bandwidth(level.bandwidth)}; "
        f"all-reduce {in_bandwidth(level.ring_bandwidth)}",
    )
