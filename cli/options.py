"""The options of the commands, made from the tables of ``autopipe.options``, and their help."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from autopipe.commands import option_values
from autopipe.errors import AutopipeError
from autopipe.options.commands import PipelineOptions, exclusive_pair, given, options_of
from autopipe.options.table import OPTIONS, Option, flag_of
from autopipe.pipeline import Pipeline

from .terminal import Terminal

Function = TypeVar("Function", bound=Callable[..., Any])
OUTPUT = OPTIONS["work_dir"].group
GROUPS = tuple(dict.fromkeys(option.group for option in OPTIONS.values()))
_GENERAL = Option("", group=OUTPUT, common=True)
FEW = 10
"""The number of options up to which ``--help`` shows them all."""


class Value(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click
    """A value that ``option_values.from_text`` reads; its ValueError becomes a usage error."""

    name = "value"

    def __init__(self, name: str, option: Option) -> None:
        self.option_name, self.option = name, option

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a text, or a number from a settings file."""
        if not isinstance(value, (str, int, float)):
            return value
        try:
            return option_values.from_text(self.option_name, self.option, str(value))
        except (ValueError, AutopipeError) as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        """Complete a name."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in option_values.choices(self.option) if name.startswith(incomplete)]


class TableOption(click.Option):
    """An option, whose variable is ``AUTOPIPE_<COMMAND>_<NAME>``, or ``AUTOPIPE_<NAME>`` for all commands."""

    def __init__(self, *args: Any, entry: Option = _GENERAL, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entry = entry

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the command's own variable, else of the shared one."""
        own = super().resolve_envvar_value(ctx)
        return own if own is not None else os.environ.get(f"AUTOPIPE_{(self.name or '').upper()}") or None


class Command(click.Command):
    """A command whose ``--help`` shows its common options, and whose ``--help-all`` shows all by group."""

    def is_short(self) -> bool:
        """Return whether ``--help`` shows all options."""
        return sum(entry.group != OUTPUT for entry in map(_entry, self.params)) <= FEW

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with ``--help-all`` if ``--help`` leaves options out."""
        return [*super().get_params(ctx), *([] if self.is_short() else [_HELP_ALL])]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options and the headings of the others, or all options below their headings."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        groups = {heading: [param for param in options if _entry(param).group == heading] for heading in GROUPS}
        options = [param for group in groups.values() for param in group]
        others: list[str] = []
        if ctx.meta.get(_ALL):
            sections = groups
        elif self.is_short():
            sections = {"Options": options}
        else:
            sections = {"Common options": [param for param in options if _entry(param).common]}
            others = [heading for heading, group in groups.items() if not all(_entry(param).common for param in group)]
        for heading, params in sections.items():
            records = [record for param in params if (record := param.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
        if others:
            formatter.write_paragraph()
            formatter.write_text(f"For further options, see {ctx.command_path} --help-all: {', '.join(others)}.")

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Raises: click.UsageError if two options are given that exclude each other."""
        pair = exclusive_pair({str(param.name): _entry(param) for param in self.params}, ctx.params)
        if pair is not None:
            raise click.UsageError(f"{' and '.join(map(flag_of, pair))} exclude each other; give one", ctx)
        return super().invoke(ctx)

    def complete_help(self, ctx: click.Context) -> str:
        """Return the help with all options."""
        ctx.meta[_ALL] = not self.is_short()
        return self.get_help(ctx)


_ALL = f"{__name__}.all"


def _entry(param: click.Parameter) -> Option:
    return param.entry if isinstance(param, TableOption) else _GENERAL


def _show_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        assert isinstance(ctx.command, Command)
        click.echo(ctx.command.complete_help(ctx), color=ctx.color)
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    expose_value=False,
    is_eager=True,
    allow_from_autoenv=False,
    callback=_show_all,
    help="Show all options, by group, and exit.",
)


def _set_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    terminal = ctx.ensure_object(Terminal)
    terminal.json = bool(value)
    if terminal.json:
        terminal.reserve()  # before the user's code is imported


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    terminal = ctx.ensure_object(Terminal)
    terminal.debug = terminal.debug or value


def _add_verbosity(sign: int) -> Callable[[click.Context, click.Parameter, int], None]:
    def callback(ctx: click.Context, param: click.Parameter, value: int) -> None:
        terminal = ctx.ensure_object(Terminal)
        terminal.verbosity += sign * value
        terminal.start_log()

    return callback


def _general(*flags: str, callback: Callable[..., Any], help: str, **kwargs: Any) -> Callable[[Function], Function]:
    return click.option(*flags, cls=TableOption, expose_value=False, callback=callback, help=help, **kwargs)


_VERBOSITY = (
    _general("-v", "--verbose", count=True, callback=_add_verbosity(1), help="Verbose output; repeat for more."),
    _general("-q", "--quiet", count=True, callback=_add_verbosity(-1), help="Print only results and errors."),
    _general("--debug", is_flag=True, callback=_set_debug, help="Print the traceback of an error."),
)
_JSON = _general(
    "--json", is_flag=True, callback=_set_json, help="Print one JSON document on stdout instead of tables."
)


def _apply(function: Any, *decorators: Callable[[Any], Any]) -> Any:
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def verbosity(function: Function) -> Function:
    """Add -v, -q and --debug."""
    return _apply(function, *_VERBOSITY)  # type: ignore[no-any-return]  # the same function


def output(function: Function) -> Function:
    """Add --json and the options of ``verbosity``; the function takes the ``Terminal`` as its first argument."""
    return _apply(click.pass_obj(function), _JSON, *_VERBOSITY)  # type: ignore[no-any-return]  # the same function


def of(command: type) -> Callable[[Function], Function]:
    """Add the options of a command. ``command``: a typed dictionary of ``autopipe.options.commands``."""
    return lambda function: _apply(function, *(_decorator(*item) for item in options_of(command).items()))


def _decorator(name: str, option: Option) -> Callable[[Any], Any]:
    kind, flags = option_values.KINDS[option.kind], option.flags or (flag_of(name),)
    how: dict[str, Any] = {} if option.default is None else {"default": option.default}
    if option.kind == "switch" and option.negatable:
        flags, how["default"] = (f"{flags[0]}/--no-{flags[0].removeprefix('--')}",), option.default
    elif option.kind == "switch":
        how["is_flag"] = True
    else:
        how["type"] = _PATHS[option.kind](option.exists) if option.kind in _PATHS else Value(name, option)
        names = () if option.kind == "schedule" else option_values.choices(option)  # too many to show
        how["metavar"] = option.metavar or (f"[{'|'.join(names)}]" if names else kind.metavar)
    extras = [] if option.default is None else [f"default: {name if option.default is True else option.default}"]
    extras += _range(option)
    how["help"] = option.help + (f"  [{'; '.join(extras)}]" if extras else "")
    how |= {"multiple": kind.repeatable, "required": option.required}
    return click.option(*flags, name, cls=TableOption, entry=option, **how)


_PATHS: dict[str, Callable[[bool], click.Path]] = {
    "file": lambda exists: click.Path(exists=exists, dir_okay=False, path_type=Path),
    "directory": lambda exists: click.Path(exists=exists, file_okay=False, path_type=Path),
    "path": lambda exists: click.Path(exists=exists, path_type=Path),
}


def _range(option: Option) -> list[str]:
    """Return the range of a number, as the help shows it."""
    if option.kind == "count":
        return [f"x>={option.least}"]
    if option.kind != "number":
        return []
    return [f"x{'>' if option.above_zero else '>='}0" if option.below is None else f"0<=x<{option.below:g}"]


def pipeline(target: str | None, options: Mapping[str, Any]) -> Pipeline:
    """Return the pipeline of the options of a command."""
    return Pipeline(target, **given(PipelineOptions, options))
