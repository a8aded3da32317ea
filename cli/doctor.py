"""``autopipe doctor``: examine this machine or others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from . import documents, launching, options
from .terminal import Terminal


@click.command("doctor")
@options.option("--links", is_flag=True, help="Measure between two ranks -> links.json, which plan then uses.")
@launching.hosting
@options.work_dir
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
    terminal.document("doctor", documents.doctor(result) | documents.links(measured))
    return 0 if result.healthy else 1
