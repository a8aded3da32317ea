"""Plans side by side, and why one is as it is: what ``plan`` prints below its stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from autopipe.ir.plan import Plan
from autopipe.units import in_bytes, in_seconds

if TYPE_CHECKING:
    from autopipe.ir.cluster import Links
    from autopipe.planning import Comparison, Explanation
    from autopipe.report.results import LayerPlanResult, Scaling

BAR = 50


def configuration(plan: Plan) -> str:
    """Return the ranks a stage as the papers write them: ``3-1``; ``8x1`` for eight stages of one."""
    counts = [str(stage.replicas) for stage in plan.stages]
    if len(counts) > 4 and set(counts) == {"1"}:
        return f"{len(counts)}x1"
    return "-".join(counts)


def comparison(found: Comparison | None) -> tuple[Any, ...]:
    """Return one row a contender, and in words whether a pipeline pays."""
    if found is None:
        return ()
    table = Table(title="compared, same minibatch", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in ("plan", "ranks a stage", "schedule"):
        table.add_column(name, overflow="fold")
    for name in ("microbatches", "a step", "samples/s", "idle", "most memory"):
        table.add_column(name, justify="right")
    reasons: list[str] = []
    for contender in found.contenders:
        plan = contender.plan
        if plan is None:
            table.add_row(contender.name, "none")
            reasons.append(f"no {contender.name}: {contender.reason}")
            continue
        table.add_row(
            found.title(contender),
            configuration(plan),
            plan.schedule,
            str(plan.num_microbatches),
            in_seconds(plan.predicted.step_seconds),
            f"{plan.predicted.samples_per_second:.4g}",
            f"{plan.predicted.bubble_fraction:.0%}" if plan.num_ranks > 1 else "-",
            in_bytes(max(stage.peak_bytes for stage in plan.stages)),
        )
    return (table, *reasons, found.verdict)


def explanation(found: Explanation | None) -> tuple[str, ...]:
    """Return why the cuts are where they are, one line each."""
    return () if found is None else ("why:", *(f"  {line}" for line in found.lines()))


def layer_plan(found: LayerPlanResult) -> tuple[Any, ...]:
    """Return the stages of a plan under PipeDream's formulas, and what it costs against the plain ways."""
    plan, layers = found.plan, found.layers
    place = {name: index for index, name in enumerate(layers.names)}
    table = Table(
        title=f"{found.name}: {plan.configuration} ({plan.space}), PipeDream's formulas",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
    )
    for name in ("stage", "layers"):
        table.add_column(name, overflow="fold")
    for name in ("devices", "number of layers", "a minibatch", "parameters"):
        table.add_column(name, justify="right")
    for index, stage in enumerate(plan.stages):
        own = [place[name] for name in stage.layers]
        table.add_row(
            str(index),
            f"{stage.layers[0]} .. {stage.layers[-1]}",
            str(stage.replicas),
            str(len(own)),
            in_seconds(sum(layers.forward_seconds[k] + layers.backward_seconds[k] for k in own)),
            in_bytes(sum(layers.parameter_bytes[k] for k in own)),
        )
    cost = plan.cost_seconds
    return (
        table,
        f"predicted: {in_seconds(cost)} a minibatch; one device {in_seconds(found.alone_seconds)} "
        f"({_speed(found.alone_seconds / cost)}), data parallel {in_seconds(found.parallel_seconds)} "
        f"({_speed(found.parallel_seconds / cost)})",
    )


def _speed(ratio: float) -> str:
    return f"the plan is slower: {ratio:.2f}x" if ratio < 1 else f"{ratio:.2f} times as fast"


def scaling(found: Scaling) -> tuple[Any, ...]:
    """Return one row a number of devices, and bars: the longer, the more samples a second."""
    table = Table(
        title=f"{found.name}, minibatch of {found.batch_size}",
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
    for point in found.points:
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
            in_bytes(max(stage.peak_bytes for stage in plan.stages)),
        )
    return (
        table,
        *reasons,
        "samples a second, and what part of the straight line from the first row they are:",
        bars(found),
    )


def bars(found: Scaling) -> str:
    """Return a bar a number of devices."""
    planned = [
        (point.gpus, point.plan.predicted.samples_per_second) for point in found.points if point.plan is not None
    ]
    most, (first, base) = max(rate for _, rate in planned), planned[0]
    width = max(len(str(gpus)) for gpus, _ in planned)
    lines = []
    for gpus, rate in planned:
        bar = "#" * max(1, round(BAR * rate / most))
        lines.append(f"{gpus:>{width}} |{bar:<{BAR}}| {rate:.4g}/s, {rate / base * first / gpus:.0%}")
    return "\n".join(lines)


def links(found: Links | None) -> tuple[str, ...]:
    """Return what was measured between two ranks."""
    if found is None:
        return ()
    host = found.host
    return (
        f"between two {found.device_kind} ranks: {in_seconds(found.latency_seconds)} latency, "
        f"{found.bandwidth / 1e9:.3g} GB/s; adding up over both {found.all_reduce_bandwidth / 1e9:.3g} GB/s",
        f"ranks that work on and on take {host.pace - 1:.0%} longer than the quietest moment of a profile; "
        f"the runtime takes {in_seconds(host.compute_seconds)} a forward or backward, "
        f"{in_seconds(host.send_seconds)} a send, {in_seconds(host.receive_seconds)} a receive, "
        f"{in_seconds(host.step_seconds)} a minibatch; to ranks that compute a message "
        f"comes {in_seconds(host.delivery_seconds)} later",
    )
