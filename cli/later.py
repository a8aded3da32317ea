"""report and sweep: named, so that nobody looks for them elsewhere, and not there yet."""

from __future__ import annotations

from pathlib import Path

import click

from . import options
from .terminal import Terminal


@click.command("report")
@click.argument("run", required=False)
@options.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="The HTML file.")
@options.output
def report_command(terminal: Terminal, run: str | None, output: Path | None) -> None:
    """Draw a run as an HTML page. Not there yet."""
    from autopipe.errors import RunError

    raise RunError(
        "autopipe report is not there yet",
        remedy="autopipe simulate draws the plan; a run's metrics.jsonl has a line for each step",
    )


@click.command("sweep")
@click.argument("file", metavar="SWEEP.toml", required=False)
@options.output
def sweep_command(terminal: Terminal, file: str | None) -> None:
    """Train several models or settings on few devices. Not there yet."""
    from autopipe.errors import RunError

    raise RunError("autopipe sweep is not there yet", remedy="one autopipe train after the other, each with --run-dir")
