"""All parts of a page: tables as text, and the numbers that the charts draw as one JSON value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autopipe.errors import counted
from autopipe.ir.cluster import Cluster
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan, most_bytes
from autopipe.ir.profile import Profile
from autopipe.ir.timeline import Timeline
from autopipe.planning import Comparison, Explanation
from autopipe.report import plans
from autopipe.report.page import curves, timelines
from autopipe.report.page.modules import module_tree
from autopipe.report.page.timelines import KINDS, OPS, Window
from autopipe.report.text import in_ranges
from autopipe.units import in_bytes, in_seconds

if TYPE_CHECKING:
    from rich.table import Table

NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a page shows. A part that is None or empty has its reason in ``missing``."""

    title: str
    plan: Plan
    graph: Graph
    facts: tuple[tuple[str, str], ...]  # of the environment: name, value
    cluster: Cluster | None = None
    profile: Profile | None = None  # for the widths of the modules
    predicted: Timeline | None = None
    predicted_note: str = ""  # what the timeline is of
    measured: Window | None = None
    history: curves.History | None = None  # None: there is no run
    comparison: Comparison | None = None
    explanation: Explanation | None = None
    # predicted, measured, memory, curves or explanation -> why the page does not have it
    missing: dict[str, str] = field(default_factory=dict)
    slower: str = ""  # why the run was slower than predicted; "" if it was not


@dataclass(frozen=True, slots=True)
class Cells:
    """A table as text."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1  # columns that are text, and not numbers


@dataclass(frozen=True, slots=True)
class Page:
    """The parts of a page."""

    title: str
    subtitle: str
    tiles: tuple[tuple[str, str, str], ...]  # name, value, remark
    stages: Cells
    boundaries: Cells
    times: Cells | None
    memory: Cells
    history: Cells | None
    remarks: tuple[str, ...]  # on the history
    compared: Cells | None
    reasons: tuple[str, ...]  # of the plan
    facts: tuple[tuple[str, str], ...]
    missing: dict[str, str]
    predicted_note: str
    measured_note: str
    data: dict[str, Any]  # what the charts draw
    slower: str = ""  # why the run was slower than predicted


def page_of(subject: Subject) -> Page:
    """Return the page of a plan or a run."""
    plan, history = subject.plan, subject.history
    timeline, window = subject.predicted, subject.measured
    predicted_rows = timelines.rows_of(timeline) if timeline is not None else []
    measured_rows = timelines.rows_of(window.timeline) if window is not None else []
    times = [timelines.seconds_by_rank(timeline, predicted_rows)] if timeline is not None else [[]]
    times.append(timelines.seconds_by_rank(window.timeline, measured_rows) if window is not None else [])
    unit = timelines.unit_of([t for t in (timeline, window.timeline if window is not None else None) if t is not None])
    data = {
        "model": module_tree(subject.graph, plan, subject.profile),
        "stages": [_stage(plan, stage.index) for stage in plan.stages],
        "boundaries": [[b.value, b.producer, list(b.consumers), b.bytes] for b in plan.boundaries],
        "gantt": {
            "unit": unit,
            "ops": [str(op) for op in OPS],
            "predicted": None if timeline is None else timelines.columns(timeline, predicted_rows, unit),
            "measured": None if window is None else timelines.columns(window.timeline, measured_rows, unit),
            "predictedNames": _row_names(plan, len(predicted_rows), 1),
            "measuredNames": _row_names(plan, len(measured_rows), plan.team),
        },
        "times": {"kinds": KINDS, "team": plan.team, "predicted": _columns(times[0]), "measured": _columns(times[1])},
        "memory": _memory(subject),
        "history": None if history is None or not history.attempts else curves.columns(history),
        "predictedRate": plan.predicted.samples_per_second,
    }
    compared = plans.comparison(subject.comparison)
    reasons = tuple(subject.explanation.lines()) if subject.explanation is not None else ()
    return Page(
        title=subject.title,
        subtitle=_subtitle(plan),
        tiles=_tiles(subject),
        stages=_stages(subject),
        boundaries=_boundaries(plan),
        times=_times(plan, times[0], times[1]),
        memory=_memory_table(subject),
        history=None if history is None else _history(history),
        remarks=() if history is None else _remarks(history),
        compared=cells_of(compared[0], left=3) if compared else None,
        reasons=(*(str(line) for line in compared[1:]), *reasons),
        facts=subject.facts,
        missing=dict(subject.missing),
        predicted_note=subject.predicted_note,
        measured_note="" if window is None else _window_note(window),
        data=data,
        slower=subject.slower,
    )


def cells_of(table: Table, left: int) -> Cells:
    """Return a table of the terminal as text."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    header = tuple(str(column.header) for column in table.columns)
    return Cells(str(table.title or ""), header, tuple(zip(*columns, strict=True)), left)


def _subtitle(plan: Plan) -> str:
    members = f" of {plan.team} members" if plan.team > 1 else ""
    return (
        f"{counted(len(plan.stages), 'stage')} on {counted(plan.num_ranks, 'rank')}{members}, {plan.schedule}, "
        f"{counted(plan.num_microbatches, 'microbatch')} of {plan.microbatch_size}, {plan.workload.precision}"
    )


def _stage(plan: Plan, index: int) -> dict[str, Any]:
    stage = plan.stages[index]
    return {"start": stage.start, "stop": stage.stop, "ranks": in_ranges(stage.ranks), "name": stage.name}


def _row_names(plan: Plan, count: int, team: int) -> list[str]:
    on: dict[int, list[int]] = {}
    for stage in plan.stages:
        for rank in stage.ranks:
            on.setdefault(rank, []).append(stage.index)
    names = []
    for row in range(count):
        stages = on.get(row // team, [])
        names.append(f"rank {row} · {'stage' if len(stages) == 1 else 'stages'} {in_ranges(stages)}")
    return names


def _columns(sums: Sequence[dict[str, float]]) -> dict[str, list[float]] | None:
    return {kind: [_rounded(row[kind]) for row in sums] for kind in KINDS} if sums else None


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _tiles(subject: Subject) -> tuple[tuple[str, str, str], ...]:
    plan, predicted, history = subject.plan, subject.plan.predicted, subject.history
    rate = history.samples_per_second if history is not None else None
    tiles = [
        (
            "time of a step",
            in_seconds(plan.batch_size / rate) if rate else in_seconds(predicted.step_seconds),
            f"predicted {in_seconds(predicted.step_seconds)}" if rate else f"predicted; {NOT_MEASURED}",
        ),
        (
            "samples per second",
            f"{rate or predicted.samples_per_second:.4g}",
            f"predicted {predicted.samples_per_second:.4g}" if rate else f"predicted; {NOT_MEASURED}",
        ),
        ("idle", *_idle(subject)),
    ]
    used = most_bytes(plan.stages)
    peaks = _measured_bytes(history)
    tiles.append(
        (
            "most memory of a rank",
            in_bytes(max(_by_rank(history).values())) if peaks else in_bytes(used),
            f"planned {in_bytes(used)}" if peaks else f"planned; {NOT_MEASURED}",
        )
    )
    losses = [loss for loss in history.losses.values() if loss is not None] if history is not None else []
    if history is not None and losses:
        tiles.append(("loss", f"{losses[-1]:.4g}", f"from {losses[0]:.4g}, after {max(history.losses)} steps"))
    return tuple(tiles)


def _idle(subject: Subject) -> tuple[str, str]:
    """Return the part of the time in which ranks do not compute: the definition of ``bubble_fraction``."""
    window, predicted = subject.measured, f"{subject.plan.predicted.bubble_fraction:.1%}"
    if window is None:
        return predicted, f"predicted; {NOT_MEASURED}"
    return f"{window.timeline.bubble_fraction:.1%}", f"predicted {predicted}"


def _stages(subject: Subject) -> Cells:
    plan, specs = subject.plan, subject.graph.parameters
    rows = []
    for stage in plan.stages:
        sizes = [specs[name].num_bytes({}) for name in stage.parameters if name in specs]
        sent = sum(b.bytes * len(b.consumers) for b in plan.boundaries if b.producer == stage.index)
        rows.append(
            (
                str(stage.index),
                in_ranges(stage.ranks),
                stage.name,
                in_seconds(stage.forward_seconds),
                in_seconds(stage.backward_seconds + stage.recompute_seconds),
                in_bytes(sum(sizes)),
                in_bytes(sent) if sent else "-",
            )
        )
    header = ("stage", "ranks", "modules", "forward", "backward", "parameters", "sends a microbatch")
    return Cells("predicted seconds are for one microbatch", header, tuple(rows), 3)


def _boundaries(plan: Plan) -> Cells:
    rows = [
        (b.value, str(b.producer), in_ranges(b.consumers), b.spec.dtype, in_bytes(b.bytes)) for b in plan.boundaries
    ]
    header = ("value", "from stage", "to stages", "dtype", "bytes a microbatch")
    return Cells("values that cross between stages", header, tuple(rows), 4)


def _times(plan: Plan, predicted: list[dict[str, float]], measured: list[dict[str, float]]) -> Cells | None:
    count = len(measured) or len(predicted) * plan.team
    if not count:
        return None
    rows = []
    for rank in range(count):
        for name, sums, own in (("predicted", predicted, rank // plan.team), ("measured", measured, rank)):
            known = own < len(sums)
            cells = tuple(in_seconds(sums[own][kind]) for kind in KINDS) if known else (NOT_MEASURED,) * len(KINDS)
            rows.append((str(rank), name if known or name == "measured" else "not predicted", *cells))
    return Cells("seconds of each rank", ("rank", "", *KINDS), tuple(rows), 2)


def _by_rank(history: curves.History | None) -> dict[int, int]:
    sums: dict[int, int] = {}
    for peak in history.peaks if history is not None else ():
        sums[peak.rank] = sums.get(peak.rank, 0) + peak.bytes
    return sums


def _measured_bytes(history: curves.History | None) -> dict[int, int]:
    """Return the largest measured peak of each stage, over its ranks."""
    peaks: dict[int, int] = {}
    for peak in history.peaks if history is not None else ():
        peaks[peak.stage] = max(peaks.get(peak.stage, 0), peak.bytes)
    return peaks


def _limit(subject: Subject, ranks: Sequence[int]) -> int:
    cluster = subject.cluster
    return min((cluster.memory_of(rank) for rank in ranks), default=0) if cluster is not None else 0


def _memory(subject: Subject) -> dict[str, Any]:
    peaks = _measured_bytes(subject.history)
    return {
        "planned": [stage.peak_bytes for stage in subject.plan.stages],
        "measured": [peaks.get(stage.index) for stage in subject.plan.stages] if peaks else None,
        "limit": _limit(subject, range(subject.plan.num_ranks)),
    }


def _memory_table(subject: Subject) -> Cells:
    peaks = _measured_bytes(subject.history)
    rows = []
    for stage in subject.plan.stages:
        limit = _limit(subject, stage.ranks)
        measured = peaks.get(stage.index)
        rows.append(
            (
                str(stage.index),
                in_ranges(stage.ranks),
                stage.name,
                in_bytes(stage.peak_bytes),
                NOT_MEASURED if measured is None else in_bytes(measured),
                "not known" if subject.cluster is None else in_bytes(limit) if limit else "no limit",
            )
        )
    header = ("stage", "ranks", "modules", "planned", "measured", "device")
    return Cells("largest memory of a rank of each stage", header, tuple(rows), 3)


def _history(history: curves.History) -> Cells:
    rows = []
    for number, attempt in enumerate(history.attempts, start=1):
        losses = [loss for loss in attempt.losses if loss is not None]
        rates = sorted(rate for rate in attempt.rates if rate is not None)
        rows.append(
            (
                str(number),
                attempt.reason or "start",
                f"{attempt.steps[0]} to {attempt.steps[-1]}",
                f"{losses[0]:.6g}" if losses else "not finite",
                f"{losses[-1]:.6g}" if losses else "not finite",
                f"{rates[len(rates) // 2]:.4g}" if rates else NOT_MEASURED,
            )
        )
    header = ("attempt", "began with", "steps", "first loss", "last loss", "samples/s (median)")
    return Cells("attempts of this run", header, tuple(rows), 2)


def _remarks(history: curves.History) -> tuple[str, ...]:
    remarks = []
    if not history.evaluations:
        remarks.append("No evaluation was made during training (--eval-every K).")
    if history.audits:
        unequal = [step for step, equal in history.audits if not equal]
        verdict = f"steps that differ: {', '.join(map(str, unequal))}" if unequal else "all equal to plain training"
        remarks.append(f"{counted(len(history.audits), 'step')} recomputed by plain training: {verdict}.")
    if history.unreadable:
        remarks.append(f"{counted(history.unreadable, 'row')} of metrics.jsonl could not be read, and are not shown.")
    return tuple(remarks)


def _window_note(window: Window) -> str:
    if window.first == window.last:
        text = f"step {window.first + 1}"
    else:
        text = f"steps {window.first + 1} to {window.last + 1}"
    if window.recorded > 1:
        return f"{text}, of median length among {window.recorded} recorded steps"
    return f"{text}, the only complete one that was recorded"
