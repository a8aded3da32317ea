"""The settings of a grid or a list, one job each, and the names that they give to jobs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ARGUMENT = "arg."
_UNSAFE = re.compile(r"[^A-Za-z0-9_.,=+-]+")
_LONGEST_FOLDER = 80


def flat(table: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (key in the file, option, value) of a table: ``arg = {width = 1}`` and ``"arg.width" = 1`` are the same.

    Options have underscores, as in ``autopipe.Pipeline``; arguments of the model are ``arg.NAME``.
    """
    for key, value in table.items():
        if key == "arg" and isinstance(value, Mapping):
            for name, entry in value.items():
                yield f"arg.{name}", ARGUMENT + name, entry
        elif key.startswith(ARGUMENT):
            yield key, key, value
        else:
            yield key, key.replace("-", "_"), value


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as ``autopipe.Pipeline`` takes them: the arguments of the model in one dictionary."""
    arguments = {name.removeprefix(ARGUMENT): value for name, value in options.items() if name.startswith(ARGUMENT)}
    others = {name: value for name, value in options.items() if not name.startswith(ARGUMENT)}
    return others | ({"arg": arguments} if arguments else {})


def combinations(grid: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the values of a grid. The last option varies fastest."""
    for chosen in itertools.product(*grid.values()):
        yield dict(zip(grid, chosen, strict=True))


def label(settings: Mapping[str, Any]) -> str:
    """Return the name of a combination: ``lr=0.001,arg.width=256``."""
    return ",".join(f"{name.replace('_', '-')}={value}" for name, value in settings.items())


def folder_of(number: int, text: str) -> str:
    """Return the name of a job's folder: its number, and its text without characters that folders cannot have."""
    return f"{number:04d}-{_UNSAFE.sub('_', text)[:_LONGEST_FOLDER]}"
