"""``autopipe run``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, NoReturn

import click

from autopipe.options.commands import ScriptCommand

from . import launching, options
from .failures import EndOfScript, Mistyped
from .running import import_torch
from .terminal import Terminal


class ScriptFile(click.Path):
    """A file that exists. The error for another name suggests a similar one."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if not Path(value).exists():
            from autopipe.workload.target.targets import nearby

            raise Mistyped(f"file not found: {value}", nearby(Path(value)), ctx)
        return super().convert(value, param, ctx)


class Run(options.Command):
    """The command. Its error for an unknown option shows where the options of the script belong."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words. Raises: click.UsageError."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.possibilities:
                raise
            own, theirs = self._divided(given)
            command = shlex.join(["autopipe", "run", *own, "--", *theirs])
            what = f"there is no option {error.option_name}; arguments of the script follow --"
            raise Mistyped(what, command, ctx) from None

    def _divided(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Return the words of this command, and those of the script: other options, and what follows them."""
        options = {name: option for option in self.params for name in option.opts if name.startswith("-")}
        own: list[str] = []
        theirs: list[str] = []
        rest = iter(words)
        for word in rest:
            name, equals, _ = word.partition("=")
            if word == "--":
                theirs += rest
            elif name in options:
                option = options[name]
                takes = isinstance(option, click.Option) and not (option.is_flag or option.count or equals)
                own += [word, next(rest, "")] if takes else [word]
            elif not word.startswith("-") and (not theirs or (Path(word).is_file() and not _has_file(own))):
                own.append(word)
            else:
                theirs.append(word)
        return own, theirs


def _has_file(words: list[str]) -> bool:
    """Return whether a Python file is among the words."""
    return any(word.endswith(".py") for word in words)


@click.command("run", cls=Run, context_settings={"ignore_unknown_options": False})
@click.argument("script", type=ScriptFile())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@options.of(ScriptCommand)
@options.verbosity
@click.pass_obj  # type: ignore[arg-type]  # it passes the terminal
def run_command(terminal: Terminal, script: Path, arguments: tuple[str, ...], **given: Any) -> NoReturn:
    """Run an unmodified training script with its model in stages.

    The script's own arguments follow ``--``. It runs once, in this process: its data, prints, files and metrics are its
    own, and only its model runs in other processes. On a CPU, standard output and weights are those of `python SCRIPT`,
    bit for bit. What cannot be equal is refused, with the line of the script.

    With --num-microbatches, the batch of each training call is cut, and its outputs are joined before the script's
    loss. The result is that of the script joining the same parts: sums in another order, other dropout masks. auto cuts
    only where a trial shows nothing but another order of sums.

    With --check, a second process is forked at the first training call. It goes on without stages up to that optimizer
    step, and all weights and standard output are compared. What it would write is kept from the file system.
    """
    import_torch()
    from autopipe.commands import script as command

    launch = launching.settings(given)
    if launch.name == "slurm":
        launching.become(terminal, command.srun(terminal.typed, given["gpus"]))
    code = command.run(
        script,
        list(arguments),
        stages=given["gpus"],
        check=given["check"],
        num_microbatches=given["num_microbatches"],
        replicas=given["replicas"],
        timeout=given["timeout"],
        folder=given["stages_dir"],
        quiet=terminal.verbosity < 0,
        launch=launch,
    )
    if code == command.INTERRUPTED:
        command.end_by_interrupt()
    raise EndOfScript(code)
