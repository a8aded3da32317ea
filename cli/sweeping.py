"""``autopipe sweep``: many trainings on a few devices."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from autopipe.options.commands import SweepCommand

from . import failures, options
from .live import SENTENCES, shown
from .terminal import Terminal

LINE_EVERY_SECONDS = 10.0


@click.command("sweep", cls=options.Command)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@options.of(SweepCommand)
@options.output
def sweep_command(
    terminal: Terminal,
    file: Path,
    devices: str | None,
    jobs_per_device: str | None,
    resume: bool,
    dry_run: bool,
    sweep_dir: Path | None,
) -> int:
    """Train the jobs of FILE, a TOML file, on the devices of this machine; longest remaining time first.

    Jobs are ordinary trainings in processes of their own. A job that another one should overtake is stopped with a
    checkpoint after its lease, and resumed later, also on another device, with the same weights bit for bit. A job that
    fails is a row of the table with its error. The model files are code, and they are run.
    """
    from autopipe.sweep.api import sweep, timetable
    from autopipe.sweep.file import parse_devices, parse_jobs_per_device, read_sweep

    read_sweep(file)  # an error in it appears at once, before torch is imported
    for option, parse, text in (
        ("--devices", parse_devices, devices),
        ("--jobs-per-device", parse_jobs_per_device, jobs_per_device),
    ):
        try:
            parse("auto" if text is None else text)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint=option) from None
    from autopipe.report import sweeps

    given = {"--devices": devices, "--jobs-per-device": jobs_per_device, "--sweep-dir": sweep_dir}
    how: Any = {"devices": devices, "jobs_per_device": jobs_per_device, "resume": resume, "sweep_dir": sweep_dir}
    again = shlex.join([str(file), *(word for key, value in given.items() if value for word in (key, str(value)))])
    if dry_run:
        with shown(terminal, Lines, Table) as events:
            planned = timetable(file, **how, on_event=events)
        terminal.table(*sweeps.timetable_tables(planned))
        terminal.document("sweep", planned)
        terminal.next(f"autopipe sweep {again}{' --resume' if resume else ''}")
        return 0
    with shown(terminal, Lines, Table) as events:
        result = sweep(file, **how, on_event=events)
    terminal.table(*sweeps.result_tables(result))
    terminal.document("sweep", result)
    if result.stopped:
        terminal.say("stopped cleanly; every job that has begun has a checkpoint")
        terminal.next(f"autopipe sweep {again} --resume")
        return failures.STOPPED
    best = next((row for row in result.jobs if row.status == "done"), None)
    if best is None:
        return 1
    terminal.next(f"autopipe export {shlex.quote(best.run_dir)} -o model.safetensors")
    return 0


class Lines:
    """Prints a line for each change of a job, and now and then the running jobs."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal, self.printed = terminal, time.monotonic()

    def __call__(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show an event."""
        say = self.terminal.say
        if (line := line_of(kind, fields)) is not None:
            say(line)
        elif kind == "table" and time.monotonic() - self.printed > LINE_EVERY_SECONDS:
            self.printed = time.monotonic()
            for row in fields["rows"]:
                if row.status == "running":
                    loss = "" if row.loss is None else f"  loss {row.loss:.6f}"
                    say(f"  {row.name}: step {row.step}/{row.steps}{loss}")


def line_of(kind: str, fields: Mapping[str, Any]) -> str | None:
    """Return the line of an event, None for one without a line."""
    if kind == "preparing":
        jobs = f" and {fields['jobs'] - 1} more with its structure" if fields["jobs"] > 1 else ""
        return f"preparing {fields['job']}{jobs}"
    if kind == "note":
        return f"  {fields['text']}"
    if kind == "job":
        on = f" on device {fields['devices']}" if fields["what"] == "started" else f" at step {fields['step']}"
        return f"[{fields['seconds']:7.1f} s] {fields['job']} {fields['what']}{on}"
    if kind == "stopping":
        return f"{fields['job']}: stopping after the current minibatch; press Ctrl-C to end at once"
    if kind in SENTENCES:
        return f"  {fields['job']}: {SENTENCES[kind](fields)}"
    return None


class Table:
    """The live table of the jobs."""

    def __init__(self, terminal: Terminal) -> None:
        from rich.live import Live

        self.fields: Mapping[str, Any] = {}
        self.now = ""
        console = terminal.console(stderr=True)
        self.live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._render)

    def __call__(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show an event."""
        if kind == "table":
            self.fields = fields
        elif kind == "progress":
            self.now = f"{fields['job']}: {fields['what']}"
        elif kind == "job":
            self.now = ""
        elif (line := line_of(kind, fields)) is not None:
            self.live.console.print(line)

    def _render(self) -> Any:
        from autopipe.report import sweeps
        from autopipe.report.text import in_minutes

        left = self.fields.get("seconds_left")
        title = f"{in_minutes(self.fields.get('seconds', 0.0))}{'' if left is None else f', {in_minutes(left)} left'}"
        title += sweeps.sharing_of(self.fields.get("jobs_per_device", 1))
        table = sweeps.jobs_table(self.fields.get("rows", ()), "metric", title)
        table.caption = self.now or None
        return table
