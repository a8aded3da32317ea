"""The options of launchers and hosts, and the output of ``--dry-run``."""

from __future__ import annotations

import contextlib
import gc
import importlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from autopipe.commands import options as table
from autopipe.launch.request import HostCommand, LaunchSettings

from . import types
from .libraries import native_libraries
from .options import Function, of, option, refuse_exclusive
from .terminal import Terminal

host_options: tuple[Callable[[Any], Any], ...] = (
    option(
        "--hosts",
        type=types.HOSTS,
        metavar="h1:2,h2:2",
        help="Hosts to reach by ssh, and the number of ranks on each; implies --launcher ssh.",
    ),
    option(
        "--hostfile",
        type=types.HOSTFILE,
        metavar="FILE",
        help="A file that lists the hosts, in lines such as `h1 slots=2`.",
    ),
    option(
        "--ssh-config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="ssh configuration file to use instead of ~/.ssh/config.",
    ),
    option(
        "--remote-python",
        metavar="PATH",
        help="Path on the hosts of a Python with autopipe installed. [default: the path of this interpreter]",
    ),
    option("--interface", metavar="NAME", help="Network interface between the ranks. [default: from the route]"),
    option(
        "--i-trust-this-network",
        "trust_network",
        is_flag=True,
        help="Allow a public internet address as the ranks' rendezvous. Their messages are not encrypted or "
        "authenticated.",
    ),
)
launch_options: tuple[Callable[[Any], Any], ...] = (
    option(
        "--launcher",
        type=types.one_of("launcher", *table.CHOICES["launcher"]),
        help="How the ranks are started. [default: local]",
    ),
    *host_options,
    option(
        "--watchdog",
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        help="Time without progress after which a run counts as hanging. [default: 20 predicted steps, at least 60]",
    ),
    option(
        "--slurm-option",
        type=types.SLURM_OPTION,
        multiple=True,
        metavar="KEY=VALUE",
        help="Option of sbatch, e.g. partition=gpu or nodes=2. Repeatable; implies --launcher slurm.",
    ),
    option("--dry-run", is_flag=True, help="Print the commands for each host without running them."),
)


def fork_early(terminal: Terminal, *, for_gpus: bool = False, also: str = "") -> None:
    """Fork the server of ranks, data readers and measurements, if this process has not run anything yet.

    ``for_gpus``: the command starts processes only if it uses a GPU. ``also``: a further module for its processes.
    """
    if not terminal.owns_process:
        return
    from autopipe.launch.rank.deferred import defer

    defer()
    with uncollected():
        import cmath  # noqa: F401  # the native modules of sympy would wait for torch's
        import unicodedata  # noqa: F401

        with native_libraries():
            import sympy  # noqa: F401  # pure Python, which captures need

        import torch

        from autopipe.launch.rank.dtensors import defer_dtensors
        from autopipe.launch.rank.early_server import fork_early as fork

        defer_dtensors()
        if also:
            importlib.import_module(also)
        if torch.version.cuda is not None or not for_gpus:
            fork()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Import without garbage collection, which looks at all objects several times, and takes a fifth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.freeze()
            gc.enable()


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
    """Return whether an option was given on the command line itself."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def settings(given: dict[str, Any]) -> LaunchSettings:
    """Return the settings of the options that ``launching`` or ``hosting`` adds.

    Raises: click.UsageError if they contradict each other.
    """
    refuse_exclusive(given)
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
    options = of(table.LaunchOptions, {**given, "launcher": launcher or None})
    return table.launch_settings(options, dry_run=given.get("dry_run", False))


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
