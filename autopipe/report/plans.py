"""The output of ``plan`` besides its stages: comparisons, explanations, and whether a model fits other devices."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan, bytes_by_rank, most_bytes
from autopipe.ir.profile import Profile
from autopipe.planning.clusters import precision_of
from autopipe.planning.cost.datasheets import datasheet, utilization
from autopipe.planning.cost.predict import timeline_of
from autopipe.schedules import render_timeline
from autopipe.units import in_bandwidth, in_bytes, in_seconds

if TYPE_CHECKING:
    from autopipe.ir.cluster import Level, Links
    from autopipe.planning import Comparison, Explanation
    from autopipe.report.results import Scaling


BAR = 50

_MOST_DRAWN = 8192  # pairs of a rank and a microbatch: more take seconds to simulate, and cannot be seen
_DRAWN_RANKS = 32
_LITTLE = 0.05  # of the memory of a device


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


@dataclass(frozen=True, slots=True)
class Fit:
    """A plan for described devices, in a few numbers."""

    device: str
    devices: int
    precision: str
    most_bytes: int  # of the device that needs the most
    memory_bytes: int  # of that device; 0: no limit
    tokens_per_second: float | None  # None if a sample is not a sequence of numbers
    mfu: float | None  # of the peak of the datasheet; None without one
    other_precision: str = ""  # one that the device computes faster in, if the plan is for fp32

    def document(self) -> dict[str, Any]:
        """Return the keys that ``plan --json`` adds."""
        return {
            "peak_bytes": self.most_bytes,
            "memory_bytes": self.memory_bytes or None,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "precision": self.precision,
        }


def fit(plan: Plan, profile: Profile, cluster: Cluster) -> Fit:
    """Return the numbers of a plan. ``profile``: as the plan was made from, with its operations."""
    used = bytes_by_rank(plan.stages)
    worst = max(used, key=lambda rank: used[rank] / (cluster.memory_of(rank) or float("inf")))
    if not cluster.memory_of(worst):
        worst = max(used, key=lambda rank: used[rank])
    predicted, device, precision = plan.predicted, cluster.devices[0], precision_of(profile)
    tokens = _tokens(profile)
    flops = profile.at(plan.microbatch_size).model_flops * plan.batch_size / plan.microbatch_size
    rate = flops / predicted.step_seconds / plan.num_ranks if predicted.step_seconds else 0.0
    return Fit(
        device.name,
        plan.num_processes,
        precision,
        used[worst],
        cluster.memory_of(worst),
        tokens * predicted.samples_per_second if tokens else None,
        utilization(rate, device.datasheet, precision) if rate and device.datasheet else None,
        _faster_than_fp32(device.datasheet) if precision == "fp32" else "",
    )


def _faster_than_fp32(name: str) -> str:
    if not name:
        return ""
    return "bf16" if datasheet(name).bf16 else "fp16"


def _tokens(profile: Profile) -> int | None:
    """Return the tokens of a sample: the length of the first input of whole numbers with one dimension per sample."""
    sizes = profile.graph.sizes(1)
    for each in profile.graph.inputs:
        if each.spec.dtype in ("int64", "int32") and len(each.spec.shape) == 2:
            return each.spec.concrete(sizes)[1]
    return None


def fit_lines(numbers: Fit, plan: Plan) -> str:
    """Return the verdict: whether it fits, and how fast it is."""
    predicted = plan.predicted
    of = f" of {in_bytes(numbers.memory_bytes)}" if numbers.memory_bytes else ""
    parts = [f"{in_seconds(predicted.step_seconds)} a step", f"{predicted.samples_per_second:.4g} samples/s"]
    if numbers.tokens_per_second is not None:
        parts.append(f"{numbers.tokens_per_second:,.0f} tokens/s")
    if numbers.mfu is not None:
        parts.append(f"MFU {numbers.mfu:.0%}")
    parts.append(f"bubble {predicted.bubble_fraction:.0%}")
    hint = ""
    left = numbers.memory_bytes - numbers.most_bytes
    if numbers.memory_bytes and left < _LITTLE * numbers.memory_bytes:
        hint += f"\nlittle to spare: {in_bytes(max(left, 0))} by estimate; --gpu-memory SIZE plans for less memory"
    if numbers.other_precision:
        hint += f"\nplanned in fp32, as the model is; for mixed precision, add --precision {numbers.other_precision}"
    return (
        f"fits {numbers.devices} x {numbers.device} in {numbers.precision}: at most "
        f"{in_bytes(numbers.most_bytes)}{of} on a device\n"
        f"estimate: {', '.join(parts)}{hint}"
    )


def picture(plan: Plan, profile: Profile, cluster: Cluster) -> str:
    """Return the timeline of a step as text, equal ranks in one row; "" if it is too large to see."""
    if plan.num_ranks > _DRAWN_RANKS or plan.num_ranks * plan.num_microbatches > _MOST_DRAWN:
        return ""
    *rows, scale, footer = render_timeline(timeline_of(plan, profile, cluster), 72).splitlines()
    drawn: list[tuple[str, str]] = []  # label and timeline
    for line, of_rank in itertools.groupby(rows, lambda row: row[row.index("|") :]):
        labels = [row[: row.index("|")] for row in of_rank]
        ranks = [number for label in labels for number in re.findall(r"\d+", label)]
        label = labels[0].strip() if len(labels) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        drawn.append((label, line))
    width = max(len(label) for label, _ in drawn)
    by = width + 1 - rows[0].index("|")  # the labels are wider by
    scale = " " * by + scale if by >= 0 else scale[-by:]
    return "\n".join([*(f"{label:<{width}} {line}" for label, line in drawn), scale, footer])
