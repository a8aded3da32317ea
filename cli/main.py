"""The ``autopipe`` command: the list of commands, each imported when it is called."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import multiprocessing
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from autopipe import __version__
from autopipe.commands.settings import WORK_DIRECTORY

from . import config, options
from .failures import EndOfScript, Mistyped, guarded
from .terminal import Terminal, open_streams

# command -> (module, its one-line help): `autopipe --help` imports none of them
COMMANDS: dict[str, tuple[str, str]] = {
    "profile": ("planning", "Measure the cost of each part of a model."),
    "plan": ("planning", "Cut the model into stages, each on one or more ranks."),
    "generate": ("planning", "Write the stages as readable Python files."),
    "simulate": ("planning", "Simulate the plan without running it."),
    "run": ("script", "Run an unmodified training script with its model in stages."),
    "check": ("running", "Compare the plan with plain training, parameter by parameter."),
    "train": ("running", "Train, after running every step that is missing or stale."),
    "runs": ("inspecting", "List the runs of the work directory."),
    "show": ("inspecting", "Show one run: losses, checkpoints, failures, next commands."),
    "eval": ("running", "Evaluate a run on held-out data, in stages."),
    "export": ("running", "Write a run's weights as one file for the unmodified model."),
    "report": ("inspecting", "Write a page about a run or the plan: one HTML file."),
    "sweep": ("sweeping", "Train many models or settings on a few devices."),
    "plain": ("running", "Write the plain loop as a script that does not import autopipe."),
    "doctor": ("inspecting", "Examine this machine: versions, devices, memory, disk, gloo."),
}

# \b stops click from joining the lines
HELP = """Train an existing PyTorch model, unchanged, in pipeline stages, and prove that it is the same training.

\b
  autopipe train model.py --gpus 2      run all steps and train
  autopipe check model.py --gpus 2      compare with plain training
  autopipe export -o model.safetensors  write the weights for the unmodified model
"""


HOW_TO_BEGIN = "autopipe train model.py --gpus 2"


class Commands(click.Group):
    """A group that imports a command's module when the command is called, and converts failures to exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which the commands are used."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        # not relative: mypy and the tests import this folder as cli, users as autopipe.cli
        module = importlib.import_module(f"{__package__}.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name + "_command")
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options before the command. Raises: click.UsageError without a command, with the next one."""
        if not args and not ctx.resilient_parsing:
            raise Mistyped("no command was given", f"{_next_command()}; autopipe --help lists all commands", ctx)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command. Raises: click.UsageError for an unknown one, with the nearest name."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            nearest = difflib.get_close_matches(args[0], COMMANDS, n=1)
            remedy = "autopipe --help lists the commands"
            if nearest:
                remedy = shlex.join(["autopipe", nearest[0], *args[1:]])
            elif Path(args[0]).is_file():  # the model, without a command
                remedy = f"autopipe train {shlex.join(args)}"
            similar = f". Did you mean {nearest[0]!r}?" if nearest else ""
            raise Mistyped(f"there is no command {args[0]!r}{similar}", remedy, ctx)
        if args and args[0] in COMMANDS:
            ctx.ensure_object(Terminal).command = args[0]
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list without importing the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line, with the exit codes and error messages of ``failures``."""
        typed = args[0] if args else kwargs.get("args")
        words = tuple(sys.argv[1:] if typed is None else typed)
        # a usage error is raised before click processes --json
        terminal = Terminal(json="--json" in words, typed=words, owns_process=typed is None)
        kwargs = {**kwargs, "standalone_mode": False, "obj": terminal}
        try:
            return guarded(lambda: super(Commands, self).main(*args, **kwargs), terminal)
        finally:
            terminal.release()


def _next_command() -> str:
    """Return the command that continues what the work directory contains."""
    if any(WORK_DIRECTORY.glob("runs/*/job.json")):
        return "autopipe show"
    if (WORK_DIRECTORY / "plan.json").is_file():
        return "autopipe train"
    return "autopipe plan --gpus 2" if (WORK_DIRECTORY / "profile.json").is_file() else HOW_TO_BEGIN


@click.command(
    "autopipe",
    cls=Commands,
    help=HELP,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "AUTOPIPE",
        "max_content_width": 100,
    },
    epilog="Options come from the command line, then AUTOPIPE_* variables, then autopipe.toml or [tool.autopipe] in "
    "pyproject.toml, then the default.",
)
@click.version_option(__version__, "--version", prog_name="autopipe", message="%(prog)s %(version)s")
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False),
    is_eager=True,
    expose_value=False,
    callback=config.apply,
    help="Settings file. [default: autopipe.toml, then pyproject.toml]",
)
@options.verbosity
def autopipe() -> None:
    """Hold the commands."""


def main() -> None:
    """Run the console script."""
    open_streams()
    try:
        autopipe(prog_name="autopipe")
    except EndOfScript:
        raise  # as python ends: functions of atexit, and files that are still open
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else int(end.code is not None))
    leave(0)


def leave(code: int) -> NoReturn:
    """End the process at once. torch needs a second or more to shut down, during which the command seems to hang."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader may be gone
            stream.flush()
    # the folder of the fork server's socket: multiprocessing removes it at a normal exit only
    folder = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]  # no public way
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)
