"""``autopipe runs``, ``show`` and ``report``: what runs left behind; ``doctor``. None runs a model file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopipe.options.commands import DoctorCommand, ReportCommand, ShowCommand, WorkOptions
from autopipe.pipeline import Pipeline
from autopipe.units import in_bytes

from . import documents, launching, options
from .terminal import Terminal

if TYPE_CHECKING:
    from autopipe.report.run_results import RunDetails

# what a page may lack
_PARTS = {
    "predicted": "a predicted schedule",
    "measured": "a measured schedule",
    "memory": "measured memory",
    "curves": "loss and throughput",
    "explanation": "the reasons for the plan",
}


@click.command("runs", cls=options.Command)
@options.of(WorkOptions)
@options.output
def runs_command(terminal: Terminal, work_dir: Path) -> None:
    """List the runs of the work directory and of its sweeps, the newest first.

    States: running; finished; stopped (cleanly, with a checkpoint); failed; interrupted (killed, or by a second
    Ctrl-C); unreadable (a file is missing or damaged); unknown (an earlier version wrote it). A narrow terminal has
    fewer columns; --json has everything.
    """
    from autopipe.commands.inspecting.overview import overview, without_runs
    from autopipe.report import run_tables

    rows = overview(work_dir)
    terminal.document("runs", {"work_dir": work_dir, "runs": rows})
    if not rows:
        terminal.say(without_runs(work_dir))
        terminal.next("autopipe train model.py --gpus 2", work_dir=work_dir)
        return
    terminal.table(*run_tables.overview(rows, time.time(), terminal.width))
    terminal.next(f"autopipe show {rows[0].name}", work_dir=work_dir)


@click.command("show", cls=options.Command)
@click.argument("run", required=False, type=click.Path(path_type=Path))
@options.of(ShowCommand)
@options.output
def show_command(terminal: Terminal, run: Path | None, verify: bool, work_dir: Path) -> None:
    """Show RUN (default: the newest), by its name in `autopipe runs` or its directory.

    Options, losses, evaluations, memory as planned and as measured, checkpoints, failures with their causes, and the
    commands that make sense next.
    """
    from autopipe.commands.inspecting.details import show
    from autopipe.report import run_tables

    shown = show(run, work_dir, verify=verify)
    terminal.table(*run_tables.details(shown, time.time(), unicode=terminal.shows("▁█")))
    terminal.document("show", _document(shown))
    terminal.next(*shown.next, separator="\n  or: ")


def _document(shown: RunDetails) -> dict[str, Any]:
    """Return the document: the keys of the run's row, and the details; losses and evaluations as lists."""
    fields = {
        **documents.plain(shown),
        "losses": [{"step": step, "loss": loss} for step, loss in shown.losses.items()],
        "evaluations": [{"step": step, "loss": loss} for step, loss in shown.evaluations.items()],
    }
    return {**fields.pop("row"), **fields}


@click.command("report", cls=options.Command)
@click.argument("run", required=False)
@options.of(ReportCommand)
@options.output
def report_command(terminal: Terminal, run: str | None, output: Path, work_dir: Path) -> None:
    """Write a page about RUN, or about the plan: one HTML file, which needs no network.

    RUN is a run directory, its name in .autopipe/runs, or the word `plan`. [default: the newest run; without runs, the
    plan]

    The page has the model by module, the schedule, the time and memory of each rank, loss and throughput, and the
    reasons for the plan: predicted, and measured as far as the run has it (`train --timeline --measure-memory`). No
    model file is read.
    """
    with terminal.progress() as progress:
        result = Pipeline(work_dir=work_dir).report(output, run, on_progress=progress)
    subject = f"of {result.run_dir}, {result.steps} steps" if result.run_dir else "of the plan"
    terminal.table(f"{result.path}: {in_bytes(result.bytes)}, {subject}")
    terminal.notes(tuple(f"without {_PARTS[part]}: {why}" for part, why in result.missing.items()))
    terminal.document("report", result)


@click.command("doctor", cls=options.Command)
@options.of(DoctorCommand)
@options.output
def doctor_command(terminal: Terminal, links: bool, work_dir: Path, **given: Any) -> int:
    """Examine this machine: versions, devices, memory, disk, gloo. With --hosts, those hosts and their network.

    The exit code is 1 if something does not work.
    """
    from autopipe.commands import doctor
    from autopipe.commands.calibration.links import measure as measure_links
    from autopipe.report import plans, tables

    where = launching.settings(given)
    with terminal.progress() as progress:
        result = doctor.examine_hosts(where, progress) if where.hosts else doctor.examine(work_dir, progress)
        measured = measure_links(work_dir, None, progress, where) if links else None
    terminal.table(tables.findings(result), *plans.links(measured))
    terminal.document("doctor", {"healthy": result.healthy, "findings": result.findings} | documents.links(measured))
    return 0 if result.healthy else 1
