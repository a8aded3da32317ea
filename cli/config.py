"""The settings file: ``autopipe.toml``, or ``[tool.autopipe]`` in ``pyproject.toml``, as defaults of the options.

Keys at the top hold for every command that has such an option; a table such as ``[train]`` for that command alone.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

from autopipe.errors import unknown_choice


def apply(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Read the settings file into the context's ``default_map``. A key that no command knows is a usage error."""
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
        for command, names in known.items():
            if name in names:
                defaults[command][name] = entry
    for command, names in known.items():
        for key, entry in table.get(command, {}).items():
            name = key.replace("-", "_")
            if name not in names:
                raise click.UsageError(f"{path}: [{command}] {unknown_choice('option', name, names)}", ctx)
            defaults[command][name] = entry
    ctx.default_map = defaults


def _options(command: click.Command | None) -> list[str]:
    """Return the names that a settings file may give: those of the options, as they are typed."""
    params = command.params if command is not None else []
    return [param.name for param in params if isinstance(param, click.Option) and param.name]


def _find(given: str | None) -> tuple[Path | None, dict[str, Any]]:
    for path in [Path(given)] if given else [Path("autopipe.toml"), Path("pyproject.toml")]:
        if not path.is_file():
            continue
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise click.UsageError(f"{path} is no TOML file: {error}") from None
        if path.name == "pyproject.toml":
            table = table.get("tool", {}).get("autopipe", {})
        if table:
            return path, table
    return None, {}
