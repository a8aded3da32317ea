"""doctor: what this machine has, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import click

from . import documents, options
from .terminal import Terminal


@click.command("doctor")
@options.option("--links", is_flag=True, help="Measure between two ranks -> links.json, which plan then uses.")
@options.work_dir
@options.output
def doctor_command(terminal: Terminal, links: bool, work_dir: Path) -> int:
    """Look at this machine: versions, devices, memory, disk, gloo. Exit code 1 where something does not work."""
    from autopipe.report import plans, tables
    from autopipe.workflow import doctor
    from autopipe.workflow.links import measure as measure_links

    with terminal.progress() as progress:
        result = doctor.examine(work_dir, progress)
        measured = measure_links(work_dir, None, progress) if links else None
    terminal.table(tables.findings(result), *plans.links(measured))
    terminal.document("doctor", documents.doctor(result) | documents.links(measured))
    return 0 if result.healthy else 1
