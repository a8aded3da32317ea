"""The settings file, ``autopipe.toml`` or ``[tool.autopipe]`` in ``pyproject.toml``: defaults of the options.

Top-level keys apply to every command that has the option; a table such as ``[train]`` applies to that command.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

from autopipe.errors import unknown_choice


def apply(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Read the settings file into the context's ``default_map``. Raises: click.UsageError for an invalid file."""
    path, table = _find(value)
    if path is None:
        return
    group = ctx.command
    assert isinstance(group, click.Group)
    known = {name: _options(group.get_command(ctx, name)) for name in group.list_commands(ctx)}
    everything = sorted({name for names in known.values() for name in names})
    defaults: dict[str, dict[str, Any]] = {name: {} for name in known}
    for key, entry in table.items():
        name = key.replace("-", "_")
        if isinstance(entry, dict):
            if key not in known:
                raise click.UsageError(f"{path}: {unknown_choice('command', key, known)}", ctx)
            continue
        if name not in everything:
            raise click.UsageError(f"{path}: {unknown_choice('option', name, everything)}", ctx)
        for command, options in known.items():
            if name in options:
                _refuse_kind(ctx, f"{path}: {key}", options[name], entry)
                defaults[command][name] = entry
    for command, options in known.items():
        own = table.get(command)
        for key, entry in own.items() if isinstance(own, dict) else ():
            name = key.replace("-", "_")
            if name not in options:
                raise click.UsageError(f"{path}: [{command}] {unknown_choice('option', name, options)}", ctx)
            _refuse_kind(ctx, f"{path}: [{command}] {key}", options[name], entry)
            defaults[command][name] = entry
    ctx.default_map = defaults


def _options(command: click.Command | None) -> dict[str, click.Option]:
    """Return the options that a settings file may set, by name."""
    params = command.params if command is not None else []
    return {param.name: param for param in params if isinstance(param, click.Option) and param.name}


def _refuse_kind(ctx: click.Context, where: str, option: click.Option, entry: Any) -> None:
    """Refuse a value of the wrong type: click would accept true as 1, and fail on a table. Raises: click.UsageError."""
    if option.multiple and isinstance(entry, list):
        right = all(isinstance(item, str) for item in entry)
        wanted = "a list of texts"
    elif option.is_flag:
        right, wanted = isinstance(entry, bool), "true or false"
    elif option.count:
        right, wanted = type(entry) is int, "a whole number"
    else:
        right, wanted = type(entry) in (str, int, float) and "\0" not in str(entry), "a number or a text"
    if not right:
        raise click.UsageError(f"{where} is {entry!r:.60}; it must be {wanted}", ctx)


def _find(given: str | None) -> tuple[Path | None, dict[str, Any]]:
    for path in [Path(given)] if given else [Path("autopipe.toml"), Path("pyproject.toml")]:
        if not path.is_file():
            continue
        try:
            table: Any = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not TOML, or not a date
            raise click.UsageError(f"{path} is not a TOML file: {error}") from None
        for key in ("tool", "autopipe") if path.name == "pyproject.toml" else ():
            table = table.get(key, {})
            if not isinstance(table, dict):
                raise click.UsageError(f"{path}: {key} is {table!r:.60}; it must be a table")
        if table:
            return path, table
    return None, {}
