"""The settings of launchers and hosts, and the output of ``--dry-run``."""

from __future__ import annotations

import contextlib
import gc
import importlib
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import click

from autopipe.commands.options import launch_settings
from autopipe.launch.request import HostCommand, LaunchSettings

from .libraries import native_libraries
from .terminal import Terminal


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
