"""The options that say where the ranks run, the settings that they make, and what ``--dry-run`` shows."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from autopipe.commands import options as table
from autopipe.launch.request import HostCommand, LaunchSettings

from . import types
from .options import Function, of, option, refuse_exclusive
from .terminal import Terminal

host_options: tuple[Callable[[Any], Any], ...] = (
    option(
        "--hosts",
        type=types.HOSTS,
        metavar="h1:2,h2:2",
        help="Machines that ssh reaches, and how many ranks each takes; implies --launcher ssh.",
    ),
    option(
        "--hostfile",
        type=types.HOSTFILE,
        metavar="FILE",
        help="The same as a file of lines such as `h1 slots=2`.",
    ),
    option(
        "--ssh-config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="For ssh, in place of your own ~/.ssh/config.",
    ),
    option(
        "--remote-python",
        metavar="PATH",
        help="Python on the hosts, with autopipe installed. [default: the path of this one]",
    ),
    option("--interface", metavar="NAME", help="Network interface between the ranks. [default: by the route]"),
    option(
        "--i-trust-this-network",
        "trust_network",
        is_flag=True,
        help="Let ranks meet at an address of the public internet; their messages are neither secret nor protected.",
    ),
)
launch_options: tuple[Callable[[Any], Any], ...] = (
    option(
        "--launcher",
        type=types.one_of("launcher", *table.CHOICES["launcher"]),
        help="How ranks are started. [default: local]",
    ),
    *host_options,
    option(
        "--watchdog",
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        help="No progress for so long is a hang. [default: 20 predicted steps, 60 or more]",
    ),
    option(
        "--slurm-option",
        type=types.SLURM_OPTION,
        multiple=True,
        metavar="KEY=VALUE",
        help="For sbatch, such as partition=gpu or nodes=2. Repeatable; implies --launcher slurm.",
    ),
    option("--dry-run", is_flag=True, help="Show what would be run on each host, and run nothing."),
)


def _add(function: Function, decorators: Sequence[Callable[[Any], Any]]) -> Function:
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def launching(function: Function) -> Function:
    """Add the options of launchers and hosts."""
    return _add(function, launch_options)


def hosting(function: Function) -> Function:
    """Add the options of hosts alone."""
    return _add(function, host_options)


def _typed(name: str) -> bool:
    """Whether an option was given on the command line itself."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def settings(given: dict[str, Any]) -> LaunchSettings:
    """Return the settings of the options that ``launching`` or ``hosting`` adds.

    Raises: click.UsageError where they contradict each other.
    """
    refuse_exclusive(given)
    hosts = given["hosts"] or given["hostfile"] or ()
    launcher = given.get("launcher") or ""
    if hosts and launcher not in ("", "ssh"):
        raise click.UsageError(f"--hosts is for --launcher ssh, not for {launcher}")
    if given.get("slurm_option") and _typed("slurm_option"):  # what a settings file holds is for whenever it is SLURM
        if hosts or launcher not in ("", "slurm"):
            raise click.UsageError(f"--slurm-option is for --launcher slurm, not for {launcher or 'ssh'}")
        launcher = "slurm"
    if launcher == "ssh" and not hosts:
        raise click.UsageError("--launcher ssh needs --hosts h1:2,h2:2 or --hostfile FILE")
    options = of(table.LaunchOptions, {**given, "launcher": launcher or None})
    return table.launch_settings(options, dry_run=given.get("dry_run", False))


def show(terminal: Terminal, commands: Sequence[HostCommand]) -> None:
    """Print what would be run: the command as it could be typed, and below it what it would read."""
    for entry in commands:
        ranks = ", ".join(map(str, entry.ranks))
        terminal.table(f"{entry.host or 'this machine'}{f', rank {ranks}' if ranks else ''}")
        lines = [shlex.join(entry.command)] if entry.command else []
        lines += [f"({entry.note})"] if entry.note else []
        lines += [f"< {line}" for line in entry.stdin.splitlines()]
        terminal.table("\n".join(f"  {line}" for line in lines))
    fields = ("host", "ranks", "command", "stdin", "note")
    terminal.document("train", {"commands": [{name: getattr(entry, name) for name in fields} for entry in commands]})
