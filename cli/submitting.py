"""The launchers that run this command again elsewhere: in SLURM's queue, in an allocation, or on a Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

import click

from . import launching
from .terminal import Terminal

if TYPE_CHECKING:
    from autopipe.commands.settings import TrainSettings


def start(terminal: Terminal, settings: TrainSettings, options: Mapping[str, str]) -> int:
    """Start the run and return the exit code. In an allocation, exec the command that starts the ranks."""
    from autopipe.commands.training import submission

    words = submission.Words.of(terminal.typed)
    inside = submission.in_an_allocation(os.environ)
    if settings.launch.dry_run:
        launching.show(terminal, submission.rehearsed(settings, words, options, inside))
        return 0
    if settings.launch.name == submission.RAY:
        streams = {"out": terminal.output, "err": sys.stderr}
        return submission.on_ray(settings, words, lambda name, line: click.echo(line, streams[name], nl=False))
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
