"""The jobs of a sweep, and its predicted timetable, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from autopipe.errors import counted
from autopipe.report.results import SweepResult, SweepRow, Timetable
from autopipe.report.tables import new_table
from autopipe.report.text import in_minutes, in_ranges
from autopipe.units import in_seconds

# leases of a timetable that are printed
_MOST_LEASES = 40


def jobs_table(rows: Sequence[SweepRow], metric: str, title: str = "") -> Table:
    """Return one row a job, in the given order."""
    ends = any(row.seconds_left is not None for row in rows)
    columns = ["job", "state", "device", "step", "loss", metric, "samples/s", *(["ends in"] if ends else [])]
    table = new_table(title, *columns, left=2)
    for row in rows:
        cells = [row.name, row.status, row.devices, _steps(row), *map(_number, (row.loss, row.metric))]
        cells.append("" if row.samples_per_second is None else f"{row.samples_per_second:.1f}")
        left = "" if row.seconds_left is None else in_minutes(row.seconds_left)
        table.add_row(*cells, *([left] if ends else []))
    return table


def sharing_of(jobs_per_device: int) -> str:
    """Return how many jobs share a device, as a part of a sentence; "" if they do not."""
    return f", up to {jobs_per_device} jobs on a device" if jobs_per_device > 1 else ""


def result_tables(result: SweepResult) -> tuple[str | Table, ...]:
    """Return the final table, best first, the errors of failed jobs, and a summary."""
    metric = "mean loss" if result.metric == "loss" else result.metric
    errors = [f"{row.name}: {row.error}" for row in result.jobs if row.error]
    done = sum(row.status == "done" for row in result.jobs)
    sharing = sharing_of(result.jobs_per_device)
    jobs = f"{done} of {counted(len(result.jobs), 'job')} done"
    summary = f"{jobs} in {in_seconds(result.seconds)}{sharing}; table: {result.results}"
    return jobs_table(result.jobs, metric), *errors, summary


def timetable_tables(timetable: Timetable) -> tuple[str | Table, ...]:
    """Return a predicted timetable: one row a lease, by start."""
    table = new_table("predicted timetable", "job", "devices", "from", "to", "step")
    for lease in timetable.leases[:_MOST_LEASES]:
        span = in_minutes(lease.start), in_minutes(lease.end)
        table.add_row(lease.job, in_ranges(lease.devices), *span, in_seconds(timetable.step_seconds[lease.job]))
    more = len(timetable.leases) - _MOST_LEASES
    lines = [f"and {counted(more, 'more lease')}"] if more > 0 else []
    lines += [f"{name} cannot be trained: {error}" for name, error in timetable.failures.items()]
    sharing = sharing_of(timetable.jobs_per_device)
    fastest = "one job a device" if sharing else "no order"
    lines.append(
        f"all jobs: {in_minutes(timetable.seconds)}{sharing}, without the start of each lease; {fastest} is "
        f"{'at best' if sharing else 'faster than'} {in_minutes(timetable.bound)}"
    )
    return table, *lines


def _steps(row: SweepRow) -> str:
    return f"{row.step}/{row.steps}" if row.steps else str(row.step)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"
