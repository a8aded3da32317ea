"""The values of options by kind: read from the texts of the command line, checked, and converted: see ``KINDS``."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopipe.commands.metrics.registry import LOGGERS
from autopipe.errors import unknown_choice, with_article
from autopipe.launch.registry import LAUNCHERS
from autopipe.options.commands import PipelineOptions, exclusive_pair, options_of
from autopipe.options.table import Option
from autopipe.units import parse_bandwidth, parse_bytes

NEWEST = -1  # of ``resume``: the newest checkpoint
MOST_MEMBERS = 1024


class LiteralText(str):
    """The text of a Python literal, as typed after ``--arg``. Any other string is itself the value."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of values."""

    check: Callable[[str, Option, Any], Any]  # (name, option, value) -> value as settings have it; raises ValueError
    metavar: str = "TEXT"
    read: Callable[[str], Any] = str  # a text of the command line -> value, or the text itself; raises ValueError
    repeatable: bool = False  # the command line reads several texts, one value each


def parsed(options: Mapping[str, Any], command: type) -> dict[str, Any]:
    """Return the options that are given, as settings have them. ``command``: of ``autopipe.options.commands``.

    Raises: TypeError for a name that the command does not have; ValueError for an invalid value.
    """
    known = options_of(command)
    for name in options:
        if name not in known:
            raise TypeError(unknown_choice("option", name, known))
    given = {name: value for name, value in options.items() if value is not None}
    values = {name: KINDS[known[name].kind].check(name, known[name], value) for name, value in given.items()}
    pair = exclusive_pair(known, values)
    if pair is not None:
        raise ValueError(f"{pair[0]} and {pair[1]} exclude each other; give one")
    return values


def from_text(name: str, option: Option, text: str) -> Any:
    """Return the value of a text of the command line. Raises: ValueError or PlanError."""
    kind = KINDS[option.kind]
    text = next((choice for choice in choices(option) if choice.lower() == text.lower()), text)
    value = kind.read(text)
    return value if value is None or kind.repeatable else kind.check(name, option, value)


def choices(option: Option) -> tuple[str, ...]:
    """Return the names that an option accepts, () for one that accepts other values."""
    if option.kind == "schedule":
        from autopipe.schedules import REGISTRY  # imported when a schedule is given, to keep --help fast

        return ("auto", *REGISTRY)
    return tuple({"launcher": LAUNCHERS, "loggers": LOGGERS}.get(option.kind, option.choices))


def _choice(name: str, option: Option, value: Any) -> str:
    if value not in choices(option):
        raise ValueError(unknown_choice(name, str(value), choices(option)))
    return str(value)


def _or_text(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that returns a text which ``read`` cannot read, for the check to refuse."""

    def value_of(text: str) -> Any:
        try:
            return read(text)
        except ValueError:
            return text

    return value_of


def _whole(name: str, option: Option, value: Any) -> int:
    if type(value) is not int or value < option.least:
        raise ValueError(f"{name} must be a whole number of at least {option.least}, got {value!r}")
    if value > option.most:
        raise ValueError(f"{name} must be at most {option.most}, got {value}")
    return value


def _switch(name: str, option: Option, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def _number(name: str, option: Option, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    if option.above_zero and value == 0:
        raise ValueError(f"{name} must be above 0 seconds, got 0")
    if option.below is not None and value >= option.below:
        raise ValueError(f"{name} must be below {option.below:g}, got {value!r}")
    return value


def _text(name: str, option: Option, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {value!r}")
    return value


def _path(name: str, option: Option, value: Any) -> Path:
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        if isinstance(text, str):
            return Path(text)
    raise ValueError(f"{name} must be a path, got {value!r}")


def _seed(name: str, option: Option, value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must be a whole number that fits in 64 bits, got {value!r}")
    return value


def _step(text: str) -> int | None:
    """Return the step of ``--resume``, ``NEWEST`` or None."""
    if text.lower() in ("newest", "true", "yes", "on"):
        return NEWEST
    if text.lower() in ("false", "no", "off", "never"):
        return None
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a step")
    return int(text)


def _resume(name: str, option: Option, value: Any) -> bool | int:
    if isinstance(value, bool) or (type(value) is int and value >= NEWEST):
        return value
    raise ValueError(f"{name} must be True, False or the step of a checkpoint, got {value!r}")


def _sizes(name: str, option: Option, value: Any) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, (list, tuple, range)) else ()
    if not sizes or not all(type(size) is int and 1 <= size <= option.most for size in sizes):
        raise ValueError(f"{name} must be a list of whole numbers of at least 1, such as 1,2,4, got {value!r}")
    return sizes


def _pair(text: str) -> tuple[str, LiteralText]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"{text!r} is not name=value")
    return name, LiteralText(value)


def _arguments(name: str, option: Option, value: Any) -> dict[str, str]:
    """Return keyword arguments of the model as texts, which ranks parse as Python literals."""
    try:
        arguments: dict[Any, Any] = dict(value)
    except (TypeError, ValueError):
        arguments = {None: None}
    if not all(isinstance(argument, str) for argument in arguments):
        raise ValueError(f"{name} must be a dictionary of the model's keyword arguments, got {value!r}")
    return {argument: _literal(argument, item) for argument, item in arguments.items()}


def _literal(name: str, value: Any) -> str:
    if isinstance(value, LiteralText):
        return value
    text = value if isinstance(value, str) and not _is_literal(value) else repr(value)
    if not isinstance(value, str) and (not _is_literal(text) or ast.literal_eval(text) != value):
        raise ValueError(
            f"arg: {name} is {with_article(type(value).__name__)}; only numbers, strings, booleans, None, and lists, "
            "tuples and dictionaries of them can be passed to ranks; build other objects in the model file"
        )
    return text


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return False
    return True


def _inputs(name: str, option: Option, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} must be a text or a list of texts, got {value!r}")
    return tuple(texts)


def _observer(name: str, option: Option, value: Any) -> str | Callable[..., Any]:
    """Return a TARGET text, or a function of any kind: no rank imports it."""
    if isinstance(value, (str, os.PathLike)):
        return str(os.fspath(value))
    if not callable(value):
        raise ValueError(f"{name} must be a function or a TARGET text, got {value!r}")
    function: Callable[..., Any] = value
    return function


def _logger(text: str) -> str:
    if text not in LOGGERS:
        raise ValueError(unknown_choice("logger", text, LOGGERS))
    return text


def _loggers(name: str, option: Option, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)):
        raise ValueError(f"{name} must be a name or a list of names, got {value!r}")
    return tuple(dict.fromkeys(_logger(str(logger)) for logger in names))


def _audits(name: str, option: Option, value: Any) -> int | None:
    if value == "auto":
        return None
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be 'auto' or a whole number of at least 0, got {value!r}")
    return value


def _team(name: str, option: Option, value: Any) -> str | int:
    if value != "auto" and (type(value) is not int or not 1 <= value <= MOST_MEMBERS):
        raise ValueError(
            f"{name} must be 'auto' or a whole number of at least 1 and at most {MOST_MEMBERS}, got {value!r}"
        )
    team: str | int = value
    return team


def _quantity(parse: Callable[[str], float], kind: type) -> Callable[[str, Option, Any], Any]:
    """Return the check of a quantity above 0, which is a number or a text with a unit."""

    def check(name: str, option: Option, value: Any) -> Any:
        if isinstance(value, str):
            return kind(parse(value))
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a number above 0 or a text with a unit, got {value!r}")
        return kind(value)

    return check


def _hosts(name: str, option: Option, value: Any) -> tuple[Any, ...]:
    from autopipe.launch.remote.hosts import checked_hosts, parse_hosts

    if isinstance(value, str):
        return parse_hosts(value)
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a text such as 'h1:2,h2:2' or a list of hosts, got {value!r}")
    return checked_hosts(value) if value else ()


def _hostfile(name: str, option: Option, value: Any) -> tuple[Any, ...]:
    from autopipe.launch.remote.hosts import checked_hosts, read_hostfile

    return checked_hosts(value) if isinstance(value, (list, tuple)) else read_hostfile(_path(name, option, value))


def _slurm_option(text: str) -> tuple[str, str]:
    from autopipe.launch.slurm import parse_option

    return parse_option(text)


def _size_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def target_text(value: Any, option: str) -> str:
    """Return the TARGET text by which every rank imports a function or class. A text or path is returned unchanged.

    Raises: ValueError for an object that cannot be imported by name, such as a lambda or a local function.
    """
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    name, module = getattr(value, "__qualname__", ""), sys.modules.get(getattr(value, "__module__", None) or "")
    if not name or module is None:
        raise _unimportable(option, f"{with_article(type(value).__name__)}, not a function or class")
    if "<" in name:
        raise _unimportable(option, f"{name}, a lambda or local function")
    attribute: Any = module
    for part in name.split("."):
        attribute = getattr(attribute, part, None)
    if getattr(attribute, "__qualname__", None) != name or getattr(value, "__self__", None) is not None:
        raise _unimportable(option, f"{name}, which {module.__name__} does not define under that name")
    return f"{_location(module, option)}:{name}"


def _location(module: Any, option: str) -> str:
    """Return the file of a script or of a single-file module, else the dotted name of a module."""
    name, path = module.__name__, getattr(module, "__file__", None)
    if name == "__main__" and module.__spec__ is not None:  # python -m package.module
        name = module.__spec__.name
    if path is None or not Path(path).is_file():
        if name == "__main__":
            raise _unimportable(option, "defined in an interactive session")
        return str(name)
    is_single = "." not in name and not hasattr(module, "__path__")
    return str(Path(path).resolve()) if is_single else str(name)


def _unimportable(option: str, problem: str) -> ValueError:
    return ValueError(
        f"{option} is {problem}; every rank imports it by name, so define it with `def` or `class` at the top level of "
        "a module, or pass a text such as 'model.py:build_model'"
    )


KINDS: Mapping[str, Kind] = {
    "switch": Kind(_switch, ""),
    "count": Kind(_whole, "N", _or_text(int)),
    "number": Kind(_number, "X", _or_text(float)),
    "text": Kind(_text),
    "choice": Kind(_choice),
    "schedule": Kind(_choice),
    "launcher": Kind(_choice),
    "file": Kind(_path, "FILE"),
    "directory": Kind(_path, "DIRECTORY"),
    "path": Kind(_path, "PATH"),
    "target": Kind(lambda name, option, value: target_text(value, name), "TARGET"),
    "arguments": Kind(_arguments, "NAME=VALUE", _pair, repeatable=True),
    "inputs": Kind(_inputs, repeatable=True),
    "seed": Kind(_seed, "N", _or_text(int)),
    "sizes": Kind(_sizes, "N,N,...", _or_text(_size_list)),
    "bytes": Kind(_quantity(parse_bytes, int), "SIZE"),
    "bandwidth": Kind(_quantity(parse_bandwidth, float), "RATE"),
    "team": Kind(_team, "auto|N", _or_text(int)),
    "resume": Kind(_resume, "[STEP]", _step),
    "audits": Kind(_audits, "K|auto|0", _or_text(int)),
    "hosts": Kind(_hosts, "h1:2,h2:2"),
    "hostfile": Kind(_hostfile, "FILE"),
    "slurm": Kind(lambda name, option, value: value, "KEY=VALUE", _slurm_option, repeatable=True),
    "observer": Kind(_observer, "TARGET"),
    "loggers": Kind(_loggers, read=_logger, repeatable=True),
}
TARGETS = ("target", *(name for name, option in options_of(PipelineOptions).items() if option.kind == "target"))
"""The options that name code which ranks import."""
