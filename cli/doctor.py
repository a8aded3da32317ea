"""doctor: what this machine has, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import click

from . import documents, options
from .terminal import Terminal


@click.command("doctor")
@options.work_dir
@options.output
def doctor_command(terminal: Terminal, work_dir: Path) -> int:
    """Look at this machine: versions, devices, memory, disk, gloo. Exit code 1 where something does not work."""
    from autopipe.report import tables
    from autopipe.workflow import doctor

    with terminal.progress() as progress:
        result = doctor.examine(work_dir, progress)
    terminal.table(tables.findings(result))
    terminal.document("doctor", documents.doctor(result))
    return 0 if result.healthy else 1
