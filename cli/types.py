"""Types of option values: sizes, rates, lists, and names with suggestions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from autopipe.commands.options import NEWEST
from autopipe.commands.values import LiteralText
from autopipe.errors import AutopipeError, unknown_choice
from autopipe.units import parse_bandwidth, parse_bytes


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click
    """A value that a function parses from its text; a ValueError of the function becomes a usage error."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a text, or a number from a settings file."""
        if not isinstance(value, (str, int, float)):
            return value
        try:
            return self.parse(str(value))
        except (ValueError, AutopipeError) as error:
            self.fail(str(error), param, ctx)


class Count(click.IntRange):
    """A whole number with a lower limit. The upper one appears only in the error for a larger number."""

    def __init__(self, maximum: int, minimum: int = 1) -> None:
        super().__init__(min=minimum)
        self.minimum, self.maximum = minimum, maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        try:
            number = int(super().convert(value, param, ctx))
        except click.BadParameter:
            self.fail(f"{value} is not a whole number of at least {self.minimum}", param, ctx)
        if number > self.maximum:
            self.fail(f"{number} is above the maximum of {self.maximum}", param, ctx)
        return number


class Names(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click
    """One of several names, which are looked up when needed. The error for another name suggests a similar one."""

    name = "name"

    def __init__(self, kind: str, known: Callable[[], Iterable[str]]) -> None:
        self.kind = kind
        self.known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name if it is known, in whatever case it was written."""
        for name in self.known():
            if str(value).lower() == name.lower():
                return name
        raise click.BadParameter(unknown_choice(self.kind, str(value), self.known()), ctx, param)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the names as the metavar."""
        return f"[{'|'.join(self.known())}]"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        """Complete a name."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in self.known() if name.startswith(incomplete)]


def one_of(kind: str, *names: str) -> Names:
    """Return the type for a fixed list of names."""
    return Names(kind, lambda: names)


def _schedules() -> list[str]:
    from autopipe.schedules import REGISTRY  # imported when a schedule is given, to keep --help fast

    return ["auto", *REGISTRY]


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text} is not a finite number that is at least 0")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{text} does not fit in 64 bits")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{text!r} is not a list of sizes such as 1,2,4")
    sizes = tuple(int(part) for part in parts)
    if not 1 <= min(sizes) <= max(sizes) < 2**31:
        raise ValueError(f"{text!r}: sizes must be between 1 and 2**31 - 1")
    return sizes


def _pair(text: str) -> tuple[str, LiteralText]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"{text!r} is not name=value")
    return name, LiteralText(value)


def _resume(text: str) -> int | None:
    if text.lower() in ("newest", "true", "yes", "on"):
        return NEWEST
    if text.lower() in ("false", "no", "off", "never"):
        return None
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a step")
    return int(text)


MOST_MEMBERS = 1024
RESUME = Parsed("step", _resume)


def _audits(text: str) -> int | None:
    if text.lower() == "auto":
        return None
    if not text.isdecimal():
        raise ValueError(f"{text!r} is neither a number of steps nor auto")
    return int(text)


def _team(text: str) -> str | int:
    if text.lower() == "auto":
        return "auto"
    if not text.isdecimal() or not 1 <= int(text) <= MOST_MEMBERS:
        raise ValueError(f"{text!r} is neither auto nor a number from 1 to {MOST_MEMBERS}")
    return int(text)


def _hosts(text: str) -> tuple[Any, ...]:
    from autopipe.launch.remote.hosts import parse_hosts

    return parse_hosts(text)


def _hostfile(text: str) -> tuple[Any, ...]:
    from autopipe.launch.remote.hosts import read_hostfile

    return read_hostfile(Path(text))


def _slurm_option(text: str) -> tuple[str, str]:
    from autopipe.launch.slurm import parse_option

    return parse_option(text)


SLURM_OPTION = Parsed("key=value", _slurm_option)
TEAM = Parsed("members", _team)
AUDITS = Parsed("steps", _audits)
HOSTS = Parsed("hosts", _hosts)
HOSTFILE = Parsed("file", _hostfile)
SCHEDULE = Names("schedule", _schedules)
BYTES = Parsed("size", parse_bytes)
RATE = Parsed("rate", parse_bandwidth)
NUMBER = Parsed("number", _number)
SIZES = Parsed("n,n,...", _sizes)
PAIR = Parsed("name=value", _pair)
COUNT = Count(2**31 - 1)
COUNT_OR_NONE = Count(2**31 - 1, minimum=0)
RANKS = Count(2**17)
SEED = Parsed("integer", _seed)
