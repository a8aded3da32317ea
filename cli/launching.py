"""The settings of launchers and hosts, the output of ``--dry-run``, and launchers that run the command elsewhere."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from autopipe.commands.options import launch_settings
from autopipe.launch.request import HostCommand, LaunchSettings

from .terminal import Terminal

if TYPE_CHECKING:
    from autopipe.commands.settings import TrainSettings


def _typed(name: str) -> bool:
    """Return whether an option was given on the command line itself."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def settings(given: dict[str, Any]) -> LaunchSettings:
    """Return the settings of ``LaunchOptions`` or ``HostOptions``.

    Raises: click.UsageError if they contradict each other.
    """
    hosts = given["hosts"] or given["hostfile"] or ()
    launcher = given.get("launcher") or ""
    if hosts and launcher not in ("", "ssh"):
        raise click.UsageError(f"--hosts is for --launcher ssh, not for {launcher}")
    if given.get("slurm_option") and _typed("slurm_option"):  # a settings file may hold it for runs under SLURM
        if hosts or launcher not in ("", "slurm"):
            raise click.UsageError(f"--slurm-option is for --launcher slurm, not for {launcher or 'ssh'}")
        launcher = "slurm"
    if launcher == "ssh" and not hosts:
        raise click.UsageError("--launcher ssh needs --hosts h1:2,h2:2 or --hostfile FILE")
    return launch_settings({**given, "launcher": launcher or None})


def show(terminal: Terminal, commands: Sequence[HostCommand]) -> None:
    """Print each command in a form that can be typed, followed by its standard input."""
    for entry in commands:
        ranks = ", ".join(map(str, entry.ranks))
        terminal.table(f"{entry.host or 'this machine'}{f', rank {ranks}' if ranks else ''}")
        lines = [shlex.join(entry.command)] if entry.command else []
        lines += [f"({entry.note})"] if entry.note else []
        lines += [f"< {line}" for line in entry.stdin.splitlines()]
        terminal.table("\n".join(f"  {line}" for line in lines))
    fields = ("host", "ranks", "command", "stdin", "note")
    terminal.document("train", {"commands": [{name: getattr(entry, name) for name in fields} for entry in commands]})


def start(terminal: Terminal, settings: TrainSettings, options: Mapping[str, str]) -> int:
    """Start the run and return the exit code. In an allocation, exec the command that starts the ranks."""
    from autopipe.commands.training import submission

    words = submission.Words.of(terminal.typed)
    inside = submission.in_an_allocation(os.environ)
    if settings.launch.dry_run:
        show(terminal, submission.rehearsed(settings, words, options, inside))
        return 0
    if inside:
        become(terminal, submission.srun(settings, words))
    job = submission.submit(settings, words, options)
    terminal.table(f"job {job.job} is in the queue", f"script: {job.script}", f"output: {job.output}")
    terminal.document("train", {"submitted": job})
    terminal.next(f"squeue --job {job.job}")
    return 0


def become(terminal: Terminal, command: tuple[str, ...]) -> NoReturn:
    """Run one of SLURM's programs in place of this command. Raises: RunError if it is not installed."""
    from autopipe.commands.training.submission import program

    terminal.release()  # the new command reserves it
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program(command[0]), command)  # noqa: S606  # no shell is needed
