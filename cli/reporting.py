"""``autopipe report``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from autopipe.pipeline import Pipeline
from autopipe.units import in_bytes

from . import options
from .terminal import Terminal


@click.command("report")
@click.argument("run", required=False)
@options.option(
    "-o",
    "--output",
    default=Path("report.html"),
    show_default=True,
    type=click.Path(path_type=Path),
    help="The file to write.",
)
@options.work_dir
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
    terminal.notes(tuple(f"no {part}: {why}" for part, why in result.missing.items()))
    terminal.document("report", dataclasses.asdict(result))
